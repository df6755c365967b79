"""Clients that call a server all the time, and count what becomes of their calls."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable

import grpc
from grpc import aio


@dataclasses.dataclass
class Seen:
    """What became of the calls of all clients, and which server answered those that say so."""

    ends: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    errors: list[str] = dataclasses.field(default_factory=list)
    servers: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    over: bool = False


async def calling(address: str, seen: Seen, call: Callable[[aio.Channel], Awaitable[None]], *, anew: bool) -> None:
    """One client: a channel of its own, or with `anew` one for each call. `call` counts how it ended."""
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))
    channel = aio.insecure_channel(address, options=options)
    while not seen.over:
        if anew:
            await channel.close()
            channel = aio.insecure_channel(address, options=options)
        try:
            await call(channel)
        except grpc.RpcError as error:
            seen.errors.append(f"{error.code()}: {error.details()}")
    await channel.close()


async def probing(address: str, seen: Seen) -> None:
    """A client of the HTTP port, with a connection for each call."""

    def get() -> None:
        try:
            with urllib.request.urlopen(f"{address}/readyz", timeout=60) as answer:
                seen.ends[f"http {answer.status}"] += 1
        except urllib.error.HTTPError as error:
            seen.ends[f"http {error.code}"] += 1
        except OSError as error:
            seen.errors.append(f"HTTP: {error}")

    while not seen.over:
        await asyncio.to_thread(get)
        await asyncio.sleep(0.01)
