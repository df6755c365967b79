"""`python -m omni_grpc.serve`: loads checkpoints in worker processes and serves them over gRPC until it is stopped.

A model of the hub is fetched first; the server listens meanwhile, and reports progress. Exit codes: 0 stopped cleanly,
1 the worker did not come up, 2 a setting or the checkpoint is wrong. A process that torchrun started and that is not
its rank 0 serves nothing: it is a rank of that one's model.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from omni_grpc.config import EngineConfig, LogConfig, start_logging
from omni_grpc.config.settings import Given, given
from omni_grpc.types.address import WILDCARDS
from omni_grpc.types.errors import Code, ConfigError, OmniError, Violation
from omni_grpc.types.launch import Launch
from omni_grpc.types.version import __version__

if TYPE_CHECKING:
    from omni_grpc.fleet import Fleet
    from omni_grpc.server import Server
    from omni_grpc.server.server import Backend, Stack
    from omni_grpc.types.plan import Ready

logger = logging.getLogger(__name__)

OF_TORCHRUN = ("rank_port", "rank_secret_file")
"""Settings that need it."""
STOPPED, WORKER_FAILED, BAD_SETTINGS = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM, SIGINT or SIGHUP, and returns the exit code."""
    start_logging(LogConfig())
    # it tells of every part that it loads, and of each step of making the tables of a new store
    logging.getLogger("alembic").setLevel(logging.WARNING)
    asked: Given | None = None
    try:
        asked = given(
            sys.argv[1:] if argv is None else argv,
            os.environ,
            prog="omni_grpc.serve",
            description="Loads a checkpoint in a worker process and serves it over gRPC until told to stop.",
        )
        configs = asked.configs()
        start_logging(configs[0].logs)
        return asyncio.run(_run(configs))
    except OmniError as error:
        print(f"error: {asked.told(error) if asked else error}", file=sys.stderr)
        fixable = error.code in (Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION)
        return BAD_SETTINGS if fixable else WORKER_FAILED


async def _run(configs: Sequence[EngineConfig]) -> int:
    # imported here because the worker is spawned: spawn imports this module again, and the worker has no use for grpc
    from omni_grpc.cli.launched import serve_launched
    from omni_grpc.cli.models import fleet_of

    if (launch := Launch.of(os.environ)) is not None:
        return await serve_launched(configs, launch, serve)
    if strays := [name for name in OF_TORCHRUN if any(getattr(one.ranks, name) is not None for one in configs)]:
        raise ConfigError(
            f"--{strays[0].replace('_', '-')} is for ranks that torchrun starts, and it did not start this process",
            reason="SETTING_WITHOUT_EFFECT",
            violations=tuple(Violation(name, "has no effect without torchrun; leave it out") for name in strays),
        )
    return await serve(fleet_of(configs))


async def serve(fleet: Fleet) -> int:
    """Serves a fleet that has not been started, until SIGTERM, SIGINT or SIGHUP. Raises the error that keeps it from
    starting.
    """
    from omni_grpc.cli.service_manager import ServiceManager
    from omni_grpc.gate import Gate
    from omni_grpc.server import Server

    server = Server(gate := Gate(fleet), fleet.config, beside=_stacks(fleet.config))
    logger.info("%s", fleet.storage.info)
    signals = _signals()
    if gate.audit.on:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, gate.audit.reopen)
    starting, asked = asyncio.create_task(server.start()), asyncio.create_task(signals.get())
    await asyncio.wait({starting, asked}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        logger.info("stopped while the model was loading")
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return STOPPED
    await starting
    # what is here now stays: a full collection that goes through all of it would hold up every stream for a tenth of a
    # second
    gc.collect()
    gc.freeze()
    _announce(fleet, server)
    with ServiceManager.of(os.environ).running(f"serving {server.address}"):
        await _until_asked(server, asked)
    await _stop(server, fleet.config.server.drain_timeout, signals)
    return STOPPED


def _stacks(config: EngineConfig) -> Sequence[Callable[[Backend], Stack]]:
    """The stacks beside gRPC. Raises ConfigError where the packages of one are missing."""
    if not config.http.on:
        return ()
    try:
        from omni_grpc.web.port import HttpPort
    except ModuleNotFoundError as error:
        message = f"--http-port needs the package {error.name}: pip install 'omni-grpc[web]'"
        raise ConfigError(message, reason="PACKAGE_MISSING", violations=(Violation("http_port", message),)) from error
    return (HttpPort,)


async def _until_asked(server: Server, asked: asyncio.Task[str]) -> None:
    """Returns when a signal has come, or another server has taken over and those who were connected have gone there."""
    succeeded = asyncio.create_task(server.succeeded())
    await asyncio.wait({asked, succeeded}, return_when=asyncio.FIRST_COMPLETED)
    if not asked.done():
        retiring = asyncio.create_task(server.retire())
        await asyncio.wait({asked, retiring}, return_when=asyncio.FIRST_COMPLETED)
        retiring.cancel()
    succeeded.cancel()
    # a signal from now on cuts the drain short
    asked.cancel()


async def _stop(server: Server, drain: float, signals: asyncio.Queue[str]) -> None:
    """Lets the remaining jobs finish, for `drain` seconds at most, or until a second signal comes."""
    logger.info("draining: no new jobs; existing jobs get %g s to finish, a second signal ends them now", drain)
    stopping, asked_again = asyncio.create_task(server.stop(drain)), asyncio.create_task(signals.get())
    await asyncio.wait({stopping, asked_again}, return_when=asyncio.FIRST_COMPLETED)
    if not stopping.done():
        await server.stop()
    await stopping
    asked_again.cancel()


def _signals() -> asyncio.Queue[str]:
    """The names of SIGTERM, SIGINT and SIGHUP as they come. SIGHUP stays ignored where it is, as by nohup."""
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[str]()
    hang_up = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else []
    for number in (signal.SIGTERM, signal.SIGINT, *hang_up):
        loop.add_signal_handler(number, queue.put_nowait, number.name)
    return queue


def _announce(fleet: Fleet, server: Server) -> None:
    """The one line on stdout: a parent process can wait for it and read the address from it."""
    loaded = [model for model in fleet.models if model.ready is not None]
    names = ", ".join(model.name for model in loaded)
    about = [f"model {names}" if len(loaded) == 1 else f"models {names}"]
    about += dict.fromkeys(f"{one.ready.device} {_precision(one.ready)}" for one in loaded if one.ready is not None)
    if fleet.config.server.host in WILDCARDS:
        about.append("all interfaces")
    print(f"omni_grpc {__version__} listening on {server.address} ({', '.join(about)})", flush=True)


def _precision(ready: Ready) -> str:
    """What the denoiser is computed in: its dtype, or that of its activations below the formats of its weights."""
    formats = " and ".join(sorted(ready.found.quantized_layers))
    return f"{formats} weights, {ready.dtype} activations" if formats else ready.dtype


if __name__ == "__main__":
    sys.exit(main())
