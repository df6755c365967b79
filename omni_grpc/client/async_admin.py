"""What an operator asks of a server."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import grpc

from omni_grpc.client.async_connection import AsyncConnection
from omni_grpc.client.channel import UNARY_TIMEOUT
from omni_grpc.client.failure import from_call
from omni_grpc.v1.admin_pb2 import (
    DrainRequest,
    DrainResponse,
    GetServerStatsRequest,
    LoadLoraRequest,
    ServerStats,
    StartProfileRequest,
    StartProfileResponse,
    StopProfileRequest,
    StopProfileResponse,
    UnloadLoraRequest,
    UnloadLoraResponse,
    WatchServerStatsRequest,
)
from omni_grpc.v1.model_pb2 import ListLorasRequest, Lora

LOAD_TIMEOUT = 1800.0
"""Seconds that loading an adapter may take: it may be downloaded first."""


class AsyncAdmin:
    """The calls of an operator, through the connection of a client. They need the scope `admin`, those of the load
    `read`. Errors are those of the client.
    """

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def stats(self) -> ServerStats:
        """The load at this moment."""
        reply = await self._connection.unary(self._connection.admin.GetServerStats, GetServerStatsRequest())
        stats: ServerStats = reply.stats
        return stats

    async def watch_stats(self, interval: float = 1.0) -> AsyncGenerator[ServerStats, None]:
        """The load every `interval` seconds, until the server stops."""
        request = WatchServerStatsRequest()
        request.interval.FromNanoseconds(int(interval * 1e9))
        call = self._connection.admin.WatchServerStats(request)
        try:
            async for message in call:
                yield message.stats
        except grpc.RpcError as error:
            raise from_call(error, self._connection.address).failure.error() from error
        finally:
            call.cancel()

    async def start_profile(self, *, time_limit: float | None = None, **fields: Any) -> StartProfileResponse:
        """Begins to record what a worker does. `fields` are those of StartProfileRequest, `time_limit` in seconds."""
        request = StartProfileRequest(**fields)
        if time_limit is not None:
            request.time_limit.FromNanoseconds(int(time_limit * 1e9))
        begun: StartProfileResponse = await self._connection.unary(self._connection.admin.StartProfile, request)
        return begun

    async def stop_profile(
        self, profile_id: str, *, wait: bool = False, timeout: float = UNARY_TIMEOUT
    ) -> StopProfileResponse:
        """Ends a profile, or with `wait` lets it end by itself, and returns what was recorded."""
        request = StopProfileRequest(profile_id=profile_id, wait=wait)
        found: StopProfileResponse = await self._connection.unary(self._connection.admin.StopProfile, request, timeout)
        return found

    async def load_lora(
        self,
        lora_id: str,
        model: str,
        *,
        path: str = "",
        hub_id: str = "",
        asset_id: str = "",
        filename: str = "",
        sha256: bytes = b"",
        format: str = "",
        pinned: bool = False,
        timeout: float = LOAD_TIMEOUT,
    ) -> Lora:
        """Loads a LoRA adapter while the server runs, from one of `path` (of the server's machine), `hub_id` and
        `asset_id`. For a file that is loaded under this name already, it returns at once.
        """
        source = {"path": path, "hub_id": hub_id, "asset_id": asset_id}
        request = LoadLoraRequest(
            lora_id=lora_id, model=model, filename=filename, sha256=sha256, format=format, pinned=pinned
        )
        for name, value in source.items():
            if value:
                setattr(request, name, value)
        reply = await self._connection.unary(self._connection.admin.LoadLora, request, timeout)
        lora: Lora = reply.lora
        return lora

    async def unload_lora(
        self, lora_id: str, model: str, *, wait: float | None = None, force: bool = False
    ) -> UnloadLoraResponse:
        """Unloads a LoRA adapter. Jobs that use it get `wait` seconds to end; `force` fails those that have not."""
        request = UnloadLoraRequest(lora_id=lora_id, model=model, force=force)
        if wait is not None:
            request.wait.FromNanoseconds(int(wait * 1e9))
        timeout = UNARY_TIMEOUT + (wait or 0.0)
        done: UnloadLoraResponse = await self._connection.unary(self._connection.admin.UnloadLora, request, timeout)
        return done

    async def list_loras(self, model: str = "") -> list[Lora]:
        """The LoRA adapters of a model, or of all; for any scope."""
        reply = await self._connection.unary(self._connection.models.ListLoras, ListLorasRequest(model=model))
        return list(reply.loras)

    async def drain(
        self, *, model: str = "", replica: int | None = None, timeout: float | None = None
    ) -> DrainResponse:
        """The server takes no new jobs and lets those that are there end, for `timeout` seconds at most; or
        one replica of a model does, which is then started anew. Returns at once.
        """
        request = DrainRequest(model=model, replica=replica)
        if timeout is not None:
            request.timeout.FromNanoseconds(int(timeout * 1e9))
        left: DrainResponse = await self._connection.unary(self._connection.admin.Drain, request)
        return left
