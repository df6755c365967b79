"""Blobs in memory, in a folder and in a bucket do the same."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from omni_grpc.store.blobs.open import artifacts_at
from omni_grpc.store.memory import MemoryBlobs
from omni_grpc.store.seam import Blobs
from tests.store.blob_conformance import BlobConformance, pieces
from tests.store.s3 import S3Server

BAD_NAMES = ("", ".", "..", "../a", "a/../b", "/a", "a/", "a//b", "a\0b", "a b", "a%2Fb", "\u00e9", "x" * 201)


class TestMemory(BlobConformance):
    @pytest.fixture
    def blobs(self) -> Blobs:
        return MemoryBlobs()


class Durable(BlobConformance):
    @pytest.mark.parametrize(
        "name", ["", ".", "..", "../a", "a/../b", "/a", "a/", "a//b", "a\0b", "a b", "a%2Fb", "\u00e9", "x" * 201]
    )
    async def test_a_name_that_leads_elsewhere_is_refused(self, blobs: Blobs, name: str) -> None:
        with pytest.raises(ValueError, match="may not be the name of a blob"):
            await blobs.put(name, pieces(b"x"))

    async def test_long_names_and_points_are_names(self, blobs: Blobs) -> None:
        for name in ("x" * 200, "...", ".a", "a..b/..c", "_/-"):
            assert await blobs.put(name, pieces(b"x")) == 1
            assert [found async for found in blobs.names(name, float("inf"))] == [name]

    async def test_it_outlives_the_process(self, blobs: Blobs) -> None:
        assert blobs.durable


class TestFolder(Durable):
    @pytest.fixture
    async def blobs(self, tmp_path: Path) -> AsyncIterator[Blobs]:
        self.root = tmp_path / "outputs"
        blobs = artifacts_at(str(self.root))
        await blobs.open()
        yield blobs
        await blobs.close()

    async def nothing_is_left(self) -> None:
        assert not [path for path in self.root.rglob("*") if path.is_file()]


class TestBucket(Durable):
    clock = 1.0  # S3 says whole seconds

    @pytest.fixture
    async def blobs(self, s3: S3Server) -> AsyncIterator[Blobs]:
        self.server, self.bucket = s3, s3.bucket()
        blobs = artifacts_at(s3.url(self.bucket))
        await blobs.open()
        yield blobs
        await blobs.close()

    async def nothing_is_left(self) -> None:
        assert self.server.unfinished_uploads(self.bucket) == []
        assert self.server.client.list_objects_v2(Bucket=self.bucket)["KeyCount"] == 0
