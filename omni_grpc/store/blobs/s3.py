"""Blobs as objects in a bucket of an S3-compatible object store, through obstore. Loaded only where a bucket is named.

A blob of up to 8 MiB is one request. A larger one is a multipart upload, of which nobody sees anything until it is
complete, and which is aborted where it fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import secrets
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Collection, Iterator
from typing import TYPE_CHECKING, TypeVar

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from omni_grpc.store.blobs.finished import finished
from omni_grpc.store.blobs.names import checked, valid
from omni_grpc.store.blobs.pieces import regrouped
from omni_grpc.store.blobs.s3_errors import no_such_object, no_such_range, why
from omni_grpc.store.blobs.s3_signing import with_answers
from omni_grpc.store.blobs.s3_url import Bucket
from omni_grpc.store.memory import PIECE_BYTES
from omni_grpc.store.seam import MissingBlob, StoreError
from omni_grpc.types.errors import ConfigError

if TYPE_CHECKING:
    from obstore.store import S3Config

_T = TypeVar("_T")
logger = logging.getLogger(__name__)

TIMEOUT_SECONDS = 30.0
"""How long the store may take to answer one request, with all repetitions of it."""
PART_BYTES = 8 << 20
"""A part of a multipart upload: 10000 of them, the most that S3 takes, are 78 GiB."""
PARTS_AT_ONCE = 3
"""Parts of one blob that are sent at the same time: what a put holds in memory is some 32 MiB."""
MOST_DELETED = 1000
"""Objects that one request may delete."""
LONGEST_SIGNED = 7 * 24 * 3600.0
"""How long S3 lets a signature be valid, in seconds."""
_FAILURES = (BaseError, OSError, ValueError)
"""What obstore raises: its own errors, and FileNotFoundError, TimeoutError and ValueError."""
_READ_FOR = datetime.timedelta(days=1)
"""How long one answer may take to be read, by a reader that is slow. The store's own time is that for each MiB."""


class S3Blobs:
    """Objects below the prefix of a bucket. It implements `omni_grpc.store.seam.Blobs`.

    Credentials are those of the environment (`AWS_ACCESS_KEY_ID`, ...), of a web identity, of the container or of the
    instance. `timeout`, in seconds: a store that does not answer for so long is away.
    """

    durable = True
    immediate = False
    kind = "s3"
    signs = True

    def __init__(self, bucket: Bucket, *, timeout: float = TIMEOUT_SECONDS) -> None:
        self._bucket = bucket
        self._timeout = timeout
        # one request, and a repetition of it as long as half of the time is left
        self._store = _store(bucket, timeout, datetime.timedelta(seconds=timeout / 2))
        self._reads = _store(bucket, timeout, _READ_FOR)

    async def open(self) -> None:
        probe = f"probe/{secrets.token_hex(8)}"
        try:
            with self._told("write to"):
                await self._soon(obstore.put_async(self._store, probe, b"probe", use_multipart=False))
            try:
                with self._told("read from"):
                    await self._soon(obstore.head_async(self._store, probe))
                await anext(self.names(probe, float("inf")))
            finally:
                await self.delete([probe])
        except StopAsyncIteration:
            raise ConfigError(
                f"artifact_url: cannot keep outputs in {self._bucket}: it does not list what was just put there"
            ) from None
        except StoreError as error:
            raise ConfigError(f"artifact_url: cannot keep outputs in {self._bucket}: {error}") from None

    async def close(self) -> None:
        pass  # its connections close by themselves

    async def put(self, name: str, pieces: AsyncIterable[bytes]) -> int:
        checked(name)
        size = 0
        head: list[bytes] = []
        feed = _Feed()
        upload: asyncio.Future[obstore.PutResult] | None = None
        try:
            async with contextlib.aclosing(regrouped(pieces)) as source:
                async for piece in source:
                    size += len(piece)
                    if upload is not None:
                        await self._give(feed, upload, piece)
                        continue
                    head.append(piece)
                    if size > PART_BYTES:
                        upload = self._begin(name, feed)
                        for one in head:
                            await self._give(feed, upload, one)
                        head = []
            if upload is None:
                data = await asyncio.to_thread(b"".join, head)
                upload = asyncio.ensure_future(obstore.put_async(self._store, name, data, use_multipart=False))
            else:
                await feed.give(None)
            with self._told("write to"):
                await asyncio.shield(upload)
        except BaseException:
            if upload is not None:
                feed.abandon()
                await finished(asyncio.ensure_future(self._undone(upload, name)))
            raise
        return size

    async def read(self, name: str, start: int = 0, end: int | None = None) -> AsyncIterator[bytes]:
        if not valid(name):
            raise MissingBlob(name)
        with self._told("read from", name):
            if end is not None and end <= start:
                await self._soon(obstore.head_async(self._store, name))
                return
            options: obstore.GetOptions = {}
            if end is not None:
                options = {"range": (start, end)}
            elif start > 0:
                options = {"range": {"offset": start}}
            try:
                found = await self._soon(obstore.get_async(self._reads, name, options=options))
            except _FAILURES as error:
                if options and no_such_range(error):
                    return
                raise
        first, last = found.range
        stream = found.stream(PIECE_BYTES)
        while first < last:
            with self._told("read from"):
                try:
                    chunk = await self._soon(anext(stream))
                except StopAsyncIteration:
                    raise StoreError("the object store ended an output before its end; try again") from None
            first += len(chunk)
            for at in range(0, len(chunk), PIECE_BYTES):
                yield chunk[at : at + PIECE_BYTES]

    async def delete(self, names: Collection[str]) -> None:
        known = [name for name in names if valid(name)]
        for at in range(0, len(known), MOST_DELETED):
            try:
                with self._told("delete from"):
                    await self._soon(obstore.delete_async(self._store, known[at : at + MOST_DELETED]))
            except MissingBlob:
                pass  # some stores say so

    async def names(self, prefix: str, before: float) -> AsyncIterator[str]:
        # a store lists whole parts of names: of `a/b1` it is asked for what is below `a`
        below = prefix.rpartition("/")[0]
        if below and not valid(below):
            return
        listing = obstore.list(self._store, prefix=below or None)
        while True:
            with self._told("list"):
                try:
                    found = await self._soon(anext(listing))
                except StopAsyncIteration:
                    return
            for one in found:
                name = one["path"]
                # it says whole seconds: what was put in this one may have been put at its end
                put_by = one["last_modified"].timestamp() + 1
                if name.startswith(prefix) and put_by <= before and valid(name):
                    yield name

    async def signed_url(self, name: str, seconds: float, *, mime_type: str = "", filename: str = "") -> str | None:
        """An address that is valid for `seconds`, at most 7 days: S3 permits no more. It says the type and the name of
        the file where the credentials are keys of the environment; with others it is an address of the bare bytes.
        """
        if not valid(name):
            raise MissingBlob(name)
        if not 1 <= seconds <= LONGEST_SIGNED:
            raise ValueError(f"an address is valid for 1 to {LONGEST_SIGNED:.0f} s, not for {seconds}")
        with self._told("sign an address of"):
            url = await self._soon(
                obstore.sign_async(self._store, "GET", name, datetime.timedelta(seconds=int(seconds)))
            )
        return with_answers(url, mime_type, filename)

    def _begin(self, name: str, feed: _Feed) -> asyncio.Future[obstore.PutResult]:
        """A multipart upload of what the feed is given. obstore aborts it where the feed raises."""
        upload = asyncio.ensure_future(
            obstore.put_async(
                self._store, name, feed, use_multipart=True, chunk_size=PART_BYTES, max_concurrency=PARTS_AT_ONCE
            )
        )
        upload.add_done_callback(feed.unread)
        return upload

    async def _give(self, feed: _Feed, upload: asyncio.Future[obstore.PutResult], piece: bytes) -> None:
        await feed.give(piece)
        if upload.done():
            with self._told("write to"):
                upload.result()

    async def _undone(self, upload: asyncio.Future[obstore.PutResult], name: str) -> None:
        """Waits for the end of an upload that nobody wants any more, and removes what it has put all the same."""
        # not cancelled: obstore would leave its parts in the bucket
        await asyncio.wait([upload])
        if upload.exception() is not None:
            return
        try:
            await self.delete([name])
        except StoreError as error:
            logger.warning("an output that was cancelled is left in %s: %s", self._bucket, error)

    @contextlib.contextmanager
    def _told(self, doing: str, name: str | None = None) -> Iterator[None]:
        """Raises StoreError for what obstore says, MissingBlob for an object that there is not."""
        try:
            yield
        except _FAILURES as error:
            if no_such_object(error) and doing != "write to":
                raise MissingBlob(name or "") from None
            found = why(error, self._timeout)
            # without the error, which a log would show: its text has addresses, and keys
            text = f"cannot {doing} the object store of outputs: {found.text}"
            raise StoreError(text, retryable=found.retryable) from None

    async def _soon(self, answer: Awaitable[_T]) -> _T:
        async with asyncio.timeout(self._timeout):
            return await answer


class _AbandonedError(Exception):
    """Nobody wants the upload any more."""


class _Feed:
    """Pieces on their way from a put to its upload, at most four."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue(4)
        self._abandoned = False

    def __aiter__(self) -> _Feed:
        return self

    async def __anext__(self) -> bytes:
        piece = None if self._abandoned else await self._queue.get()
        if self._abandoned:
            raise _AbandonedError
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def give(self, piece: bytes | None) -> None:
        """Waits for room. None: there is no more."""
        await self._queue.put(piece)

    def abandon(self) -> None:
        """From now on the upload gets an error."""
        self._abandoned = True
        self.unread()
        self._queue.put_nowait(None)

    def unread(self, upload: object = None) -> None:
        """Forgets what nobody reads any more, so that who gives goes on."""
        while not self._queue.empty():
            self._queue.get_nowait()


def _store(bucket: Bucket, timeout: float, answer_within: datetime.timedelta) -> S3Store:
    half = datetime.timedelta(seconds=timeout / 2)
    config: S3Config = {}
    if bucket.endpoint:
        config["endpoint"] = bucket.endpoint
    if bucket.region:
        config["region"] = bucket.region
    if bucket.virtual_hosted:
        config["virtual_hosted_style_request"] = True
    return S3Store(
        bucket.name,
        prefix=bucket.prefix or None,
        config=config,
        client_options={
            "allow_http": bucket.allow_http,
            "connect_timeout": min(datetime.timedelta(seconds=5), half),
            "timeout": answer_within,
        },
        retry_config={"retry_timeout": half},
    )
