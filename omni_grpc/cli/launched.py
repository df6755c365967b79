"""A server whose ranks torchrun has started, on one host or several: the process with RANK 0 serves, the others are its
ranks.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from omni_grpc.cli.models import fleet_of
from omni_grpc.config import EngineConfig
from omni_grpc.config.sections import RAY
from omni_grpc.engine.rank_agent import RankAgent
from omni_grpc.engine.rank_link import RankLink
from omni_grpc.engine.workers import environment_of
from omni_grpc.fleet import Fleet
from omni_grpc.types.address import MAX_PORT
from omni_grpc.types.errors import ConfigError, Violation
from omni_grpc.types.launch import Launch
from omni_grpc.types.os_errors import plain

LEAST_SECRET = 16
"""Bytes."""


async def serve_launched(
    configs: Sequence[EngineConfig], launch: Launch, serve: Callable[[Fleet], Awaitable[int]]
) -> int:
    """Until the server is told to stop, in every process; the exit code. `serve` is what rank 0 does. Raises
    ConfigError for settings that do not fit what torchrun has started, alike in all processes.
    """
    config = _checked(configs, launch)
    secret, patience = _secret(config.ranks.rank_secret_file), config.worker.worker_timeout
    port = config.ranks.rank_port or launch.port + 1
    if port > MAX_PORT:
        raise _refused("rank_port", f"would be {port}, one more than MASTER_PORT; give it a free port")
    if launch.rank == 0:
        link = RankLink(launch, port, secret, patience)
        try:
            return await serve(fleet_of(configs, link))
        finally:
            await link.close()
    agent = RankAgent(launch, port, secret, patience, environment_of(launch.local_rank, config))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, agent.leave)
    return await agent.run()


def _checked(configs: Sequence[EngineConfig], launch: Launch) -> EngineConfig:
    if len(configs) > 1:
        raise _refused("model", "names several models, and the ranks of torchrun have one; name one")
    (config,) = configs
    world = config.parallel.sizes.world
    if world != launch.world:
        start = (
            f"have torchrun start {world} (--nnodes x --nproc-per-node)" if world > 1 else "start it without torchrun"
        )
        rule = (
            f"is {launch.world}, as torchrun says, and the parallel sizes make {world} ranks; {start}, or give sizes "
            f"that make {launch.world}, such as --ulysses-degree {launch.world}"
        )
        raise ConfigError(f"WORLD_SIZE {rule}", reason="RANKS_DO_NOT_FIT", violations=(Violation("world_size", rule),))
    if config.worker.data_parallel_size > 1:
        raise _refused("data_parallel_size", "must be 1 under torchrun, whose ranks are one replica; leave it out")
    if config.worker.distributed_executor_backend == RAY:
        raise _refused("distributed_executor_backend", "is ray, and torchrun has started the ranks; leave one out")
    if config.worker.devices:
        raise _refused(
            "devices",
            "has no effect under torchrun, where a rank has the GPU of its LOCAL_RANK; set CUDA_VISIBLE_DEVICES",
        )
    return config


def _secret(file: str | None) -> bytes:
    if file is None:
        rule = (
            "is needed under torchrun: ranks take orders from whoever knows its secret; make it with "
            "`openssl rand -hex 32 > FILE` and give every host the same file"
        )
        raise _refused("rank_secret_file", rule)
    try:
        secret = Path(file).read_bytes().strip()
    except OSError as error:
        raise _refused("rank_secret_file", f"is {file}, which cannot be read: {plain(error)}") from error
    if len(secret) < LEAST_SECRET:
        rule = f"is {file}, which has {len(secret)} bytes; the least is {LEAST_SECRET}: openssl rand -hex 32 > {file}"
        raise _refused("rank_secret_file", rule)
    return secret


def _refused(field: str, rule: str) -> ConfigError:
    return ConfigError(f"--{field.replace('_', '-')} {rule}", violations=(Violation(field, rule),))
