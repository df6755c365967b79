# generated from async_admin.py by tools/gen_sync_client.py; do not edit
"""What an operator asks of a server."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import grpc

from omni_grpc.client.channel import UNARY_TIMEOUT
from omni_grpc.client.connection import Connection
from omni_grpc.client.failure import from_call
from omni_grpc.v1.admin_pb2 import (
    DrainRequest,
    DrainResponse,
    GetServerStatsRequest,
    ServerStats,
    StartProfileRequest,
    StartProfileResponse,
    StopProfileRequest,
    StopProfileResponse,
    WatchServerStatsRequest,
)


class Admin:
    """The calls of an operator, through the connection of a client. They need the scope `admin`, those of the load
    `read`. Errors are those of the client.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def stats(self) -> ServerStats:
        """The load at this moment."""
        reply = self._connection.unary(self._connection.admin.GetServerStats, GetServerStatsRequest())
        stats: ServerStats = reply.stats
        return stats

    def watch_stats(self, interval: float = 1.0) -> Generator[ServerStats, None, None]:
        """The load every `interval` seconds, until the server stops."""
        request = WatchServerStatsRequest()
        request.interval.FromNanoseconds(int(interval * 1e9))
        call = self._connection.admin.WatchServerStats(request)
        try:
            for message in call:
                yield message.stats
        except grpc.RpcError as error:
            raise from_call(error, self._connection.address).failure.error() from error
        finally:
            call.cancel()

    def start_profile(self, *, time_limit: float | None = None, **fields: Any) -> StartProfileResponse:
        """Begins to record what a worker does. `fields` are those of StartProfileRequest, `time_limit` in seconds."""
        request = StartProfileRequest(**fields)
        if time_limit is not None:
            request.time_limit.FromNanoseconds(int(time_limit * 1e9))
        begun: StartProfileResponse = self._connection.unary(self._connection.admin.StartProfile, request)
        return begun

    def stop_profile(
        self, profile_id: str, *, wait: bool = False, timeout: float = UNARY_TIMEOUT
    ) -> StopProfileResponse:
        """Ends a profile, or with `wait` lets it end by itself, and returns what was recorded."""
        request = StopProfileRequest(profile_id=profile_id, wait=wait)
        found: StopProfileResponse = self._connection.unary(self._connection.admin.StopProfile, request, timeout)
        return found

    def drain(self, *, model: str = "", replica: int | None = None, timeout: float | None = None) -> DrainResponse:
        """The server takes no new jobs and lets those that are there end, for `timeout` seconds at most; or
        one replica of a model does, which is then started anew. Returns at once.
        """
        request = DrainRequest(model=model, replica=replica)
        if timeout is not None:
            request.timeout.FromNanoseconds(int(timeout * 1e9))
        left: DrainResponse = self._connection.unary(self._connection.admin.Drain, request)
        return left
