"""The body of a process that decodes media: what a broken or malicious file does to it, it does to nobody else."""

from __future__ import annotations

import dataclasses
import logging
import resource
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from omni_grpc.config import LimitsConfig, LogConfig, start_logging
from omni_grpc.media_in.inputs import InputFile, decode
from omni_grpc.media_in.refusal import Warnings
from omni_grpc.types.errors import Code, Failure, OmniError
from omni_grpc.types.media import Inputs
from omni_grpc.types.os_errors import reason
from omni_grpc.types.plan import SharedBytes
from omni_grpc.types.shared_inputs import media_of, put_inputs

logger = logging.getLogger(__name__)

_OUT_OF_MEMORY_SCORE = Path("/proc/self/oom_score_adj")
_BASE_BYTES = 1 << 30
"""What libraries and their threads take besides the media."""


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeJob:
    """The files of one request, without their bytes, which follow one by one. `prefix` begins the names of its
    blocks.
    """

    files: tuple[InputFile, ...]
    prefix: str


@dataclasses.dataclass(frozen=True, slots=True)
class Sized:
    """Everything is decoded and needs these blocks. The answer is True where there is room for them."""

    blocks: tuple[SharedBytes, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeReply:
    """The inputs are in their blocks."""

    inputs: Inputs
    warnings: Warnings


def serve(connection: Connection, config: LimitsConfig, logs: LogConfig) -> None:
    """Decodes one job after the other until the parent is gone. The first message says that it is ready."""
    # those of a terminal or a service manager reach the whole group; the parent decides what they mean
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    start_logging(logs, "decoder")
    _limit_memory(config)
    connection.send(None)
    try:
        while True:
            _serve_one(connection, config, connection.recv())
    except (EOFError, BrokenPipeError, ConnectionResetError):
        logger.debug("the server is gone, ending")


def memory_limit(config: LimitsConfig) -> int:
    """Bytes that decoding within the limits takes at most: a video is held twice while its frames are joined, a picture
    several times with four channels, a file three times.
    """
    pixels = 6 * config.max_input_video_pixels + 20 * config.max_input_pixels
    return _BASE_BYTES + pixels + 3 * config.max_input_bytes


def _limit_memory(config: LimitsConfig) -> None:
    """Where the machine runs out of memory, this process is the first to go."""
    used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize() if _linux() else 0
    limit = used + memory_limit(config)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    if _linux():
        _OUT_OF_MEMORY_SCORE.write_text("1000")


def _linux() -> bool:
    return _OUT_OF_MEMORY_SCORE.exists()


def _serve_one(connection: Connection, config: LimitsConfig, job: DecodeJob) -> None:
    files = [dataclasses.replace(file, data=connection.recv_bytes()) for file in job.files]
    try:
        inputs, warnings = decode(files, config)
    except OmniError as error:
        connection.send(error.failure)
        return
    blocks = tuple(SharedBytes(f"{job.prefix}{i}", len(medium.data)) for i, medium in enumerate(media_of(inputs)))
    connection.send(Sized(blocks))
    if not connection.recv():
        return
    try:
        inputs = put_inputs(inputs, blocks)
    except OSError as error:
        connection.send(_no_room(blocks, error))
    else:
        connection.send(DecodeReply(inputs, warnings))


def _no_room(blocks: Sequence[SharedBytes], error: OSError) -> Failure:
    size = sum(block.size for block in blocks)
    message = (
        f"there is no room for {size} bytes of decoded inputs in shared memory ({reason(error)}); retry later, give "
        "/dev/shm more room, or lower --input-budget"
    )
    return Failure(code=Code.RESOURCE_EXHAUSTED, reason="SHARED_MEMORY_FULL", message=message, retry_after=1.0)
