"""Decodes the media of requests in a process of its own, with limits on its memory and its time."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import multiprocessing
import signal
import time
from collections.abc import Sequence
from typing import Protocol

from omni_grpc.config import LimitsConfig, LogConfig
from omni_grpc.media_in.decode_process import DecodeJob, DecodeReply, Sized, serve
from omni_grpc.media_in.inputs import InputFile
from omni_grpc.media_in.refusal import TOO_LARGE, UNREADABLE, Warnings
from omni_grpc.types import shared_memory as shared
from omni_grpc.types.errors import Failure, InternalError, InvalidArgument, OmniError, Violation
from omni_grpc.types.media import Inputs
from omni_grpc.types.plan import SharedBytes

logger = logging.getLogger(__name__)

START_SECONDS = 60.0
"""How long a process gets to import what it needs."""


class Room(Protocol):
    """Who counts the blocks of decoded inputs. Both methods are called from the thread that decodes."""

    def reserve(self, blocks: Sequence[SharedBytes]) -> None:
        """Makes room for the blocks of one request, or raises ResourceExhausted."""

    def free_blocks(self, names: Sequence[str]) -> None:
        """Gives the room back, with what is in it."""


class Decoder:
    """One process, started at the first request and again after its end. It decodes one request at a time."""

    def __init__(self, config: LimitsConfig, logs: LogConfig | None = None) -> None:
        self._config = config
        self._logs = logs or LogConfig()
        self._prefix = shared.own_prefix("in")
        self._requests = itertools.count()
        self._process: _Process | None = None

    def decode(self, files: Sequence[InputFile], room: Room) -> tuple[Inputs, Warnings]:
        """What the files hold, in shared memory, and how they were converted. Blocks, without holding the interpreter.

        Room for the blocks is reserved before they are put, and is the caller's to free then. Raises InvalidArgument
        that names each file that is refused, or all of them where the process ends or takes too long over them;
        ResourceExhausted where there is no room; InternalError where the process does not start.
        """
        if self._process is None or not self._process.alive:
            self._process = _Process(self._config, self._logs)
        process = self._process
        process.wait_until_ready()
        prefix = f"{self._prefix}{next(self._requests)}-"
        try:
            return process.decode(files, prefix, room)
        except (EOFError, ConnectionError, TimeoutError) as error:
            process.end()
            shared.sweep(prefix)
            raise self._lost(files, process, error) from error

    def kill(self) -> None:
        """Ends what is being decoded, which raises. May be called from another thread than `decode`."""
        if self._process is not None:
            self._process.kill()

    def _lost(self, files: Sequence[InputFile], process: _Process, error: Exception) -> OmniError:
        if isinstance(error, TimeoutError):
            limit = self._config.input_timeout
            return _refusal(
                files,
                TOO_LARGE,
                f"took more than {limit:g} s to decode; send fewer, shorter or smaller files, or raise --input-timeout",
            )
        how = process.exit_reason
        logger.warning("a decoder process ended %s over %s", how, ", ".join(file.path for file in files))
        rule = f"made its decoder end {how}: it is broken, or needs more memory than is given to it; send another file"
        return _refusal(files, UNREADABLE, rule)


class _Process:
    """One life of a decoder process."""

    def __init__(self, config: LimitsConfig, logs: LogConfig) -> None:
        self._timeout = config.input_timeout
        self._killed = False
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=serve, args=(theirs, config, logs), name="omni_grpc-decoder", daemon=True
        )
        self._process.start()
        theirs.close()
        self._ready = False

    def wait_until_ready(self) -> None:
        """Returns when the process can decode. Raises InternalError where it does not come to that."""
        if self._ready:
            return
        try:
            self._receive(time.monotonic() + START_SECONDS)
            self._ready = True
        except (EOFError, ConnectionError, TimeoutError) as error:
            self.end()
            message = f"the process that decodes media did not start: it ended {self.exit_reason}; its log says why"
            raise InternalError(message, reason="DECODER_NOT_STARTED") from error

    @property
    def alive(self) -> bool:
        return not self._killed and self._process.is_alive()

    @property
    def exit_reason(self) -> str:
        code = self._process.exitcode
        return f"by signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"with exit code {code}"

    def decode(self, files: Sequence[InputFile], prefix: str, room: Room) -> tuple[Inputs, Warnings]:
        end = time.monotonic() + self._timeout
        self._connection.send(DecodeJob(tuple(dataclasses.replace(file, data=b"") for file in files), prefix))
        for file in files:
            self._connection.send_bytes(file.data)
        sized = self._receive(end)
        if isinstance(sized, Failure):
            raise sized.error()
        assert isinstance(sized, Sized)
        try:
            room.reserve(sized.blocks)
        except OmniError:
            self._connection.send(False)
            raise
        try:
            self._connection.send(True)
            finished = self._receive(end)
            if isinstance(finished, Failure):
                raise finished.error()
        except BaseException:
            room.free_blocks([block.name for block in sized.blocks])
            raise
        assert isinstance(finished, DecodeReply)
        return finished.inputs, finished.warnings

    def kill(self) -> None:
        self._killed = True
        self._process.kill()

    def end(self) -> None:
        """Kills the process, and returns when it is gone."""
        self.kill()
        self._process.join()
        self._connection.close()

    def _receive(self, end: float) -> object:
        if not self._connection.poll(max(0.0, end - time.monotonic())):
            raise TimeoutError
        return self._connection.recv()


def _refusal(files: Sequence[InputFile], reason: str, rule: str) -> InvalidArgument:
    names = ", ".join(file.path for file in files)
    return InvalidArgument(
        f"{names}: {rule}", reason=reason, violations=tuple(Violation(file.path, rule) for file in files)
    )
