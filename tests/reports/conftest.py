"""A server with a fake worker, the tiny model offline, and its pipeline by itself."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from omni_grpc import Omni
from omni_grpc.checkpoint.registry import open_checkpoint
from omni_grpc.types.spec import Checkpoint
from tests.server.service import Service, serving

if TYPE_CHECKING:
    from omni_grpc.pipeline.base import Pipeline
    from omni_grpc.worker.packed import PackedRunner


@pytest_asyncio.fixture
async def service() -> AsyncIterator[Service]:
    async with serving() as running:
        yield running


@pytest.fixture(scope="package")
def omni(tiny_qwen_image: Path) -> Iterator[Omni]:
    settings = {"served_model_name": "tiny", "device": "cpu", "cpu_threads": 1, "warm_up_seconds": 0}
    with Omni(str(tiny_qwen_image), **settings) as omni:
        yield omni


@pytest.fixture(scope="package")
def checkpoint(tiny_qwen_image: Path) -> Checkpoint:
    return open_checkpoint(tiny_qwen_image, name="tiny")


@pytest.fixture(scope="package")
def pipeline(omni: Omni) -> Pipeline:
    """The one that `omni` runs; it keeps no state of a request."""
    return omni._engine.replicas[0].executor._worker._runner._pipeline


@pytest.fixture
def runner(pipeline: Pipeline) -> PackedRunner:
    import torch

    from omni_grpc.worker.packed import PackedRunner

    return PackedRunner(pipeline, torch.device("cpu"), "omni-test-reports-")
