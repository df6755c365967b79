"""A sender in a process of its own, which tests kill: `python -m tests.webhooks.process DATABASE SECRETS CA PORT`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from omni_grpc.config import OutboundConfig, WebhooksConfig
from omni_grpc.store.sql import SqlStore
from omni_grpc.webhooks import Webhooks


async def loopback(host: str, port: int) -> tuple[str, ...]:
    return ("127.0.0.1",)


async def main(database: str, secrets: str, authority: str, port: str) -> None:
    store = SqlStore.sqlite(Path(database))
    await store.open()
    hosts = (f"hooks.test:{port}", "127.0.0.0/8")
    hooks = Webhooks(
        WebhooksConfig(webhook_hosts=hosts, webhook_secrets=secrets),
        OutboundConfig(outbound_ca=authority),
        store,
        lambda job_id, state: b"",
        server="process",
        resolve=loopback,
    )
    await hooks.start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
