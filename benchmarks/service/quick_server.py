"""`python -m benchmarks.service.quick_server`: `python -m omni_grpc.serve` with the worker of `quick_worker`. All else
is the same: flags, gRPC, store, processes.

Its environment may say that its clock is wrong: OMNI_QUICK_CLOCK is a file with the seconds that it is ahead.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

from benchmarks.service.quick_worker import checkpoint
from omni_grpc.cli.serve import BAD_SETTINGS, serve
from omni_grpc.config import LogConfig, start_logging
from omni_grpc.config.settings import given
from omni_grpc.types.errors import OmniError

CLOCK = "OMNI_QUICK_CLOCK"


def main() -> int:
    if name := os.environ.get(CLOCK):
        file, right = Path(name), time.time
        time.time = lambda: right() + float(file.read_text("ascii"))
    start_logging(LogConfig())
    try:
        return asyncio.run(_run())
    except OmniError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_SETTINGS


async def _run() -> int:
    # as in omni_grpc.cli.serve: the worker imports this module again, and has no use for these
    from omni_grpc.engine import Engine, ProcessExecutor
    from omni_grpc.fleet import Fleet
    from omni_grpc.store.open import open_storage

    config = given(sys.argv[1:], os.environ, prog="quick_server", description=__doc__ or "").config()
    start_logging(config.logs)
    found = checkpoint()
    executor = ProcessExecutor(config, found, worker="benchmarks.service.quick_worker:serve")
    return await serve(Fleet.of(Engine(config, found, executor, open_storage(config))))


if __name__ == "__main__":
    sys.exit(main())
