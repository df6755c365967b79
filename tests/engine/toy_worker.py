"""Workers for the executor's tests, each in a real process: what they do follows from the checkpoint's name."""

import dataclasses
import os
import signal
import struct
import time
from pathlib import Path

from omni_grpc.config import EngineConfig
from omni_grpc.types import shared_memory as shared
from omni_grpc.types.errors import Code, Failure
from omni_grpc.types.load_progress import Loading, LoadPhase
from omni_grpc.types.plan import Broken, Died, Fetched, Media, Prepared, Ready


def serve(connection, config, checkpoint, prefix) -> None:
    connection.send(_ready())
    while (plan := connection.recv()) is not None:
        for request in plan.admit:
            if checkpoint.name == "dies":
                shared.put(b"never taken", f"{prefix}0")
                os.kill(os.getpid(), signal.SIGKILL)
            connection.send(Prepared(id=request.id, elapsed=0.0, prompt_tokens=len(request.prompt)))
        for request_id in plan.decode:
            failure = Failure(code=Code.INTERNAL, reason="X", message=signal.getsignal(signal.SIGINT).name)
            connection.send(Broken(id=request_id, phase="decode", failure=failure))
    if checkpoint.name == "stubborn":
        time.sleep(3600)


def fetches(connection, config, checkpoint, prefix) -> None:
    """Of a fetcher."""
    connection.send(Loading(phase=LoadPhase.DOWNLOADING, done_bytes=5, total_bytes=10))
    connection.send(Fetched(checkpoint=dataclasses.replace(checkpoint, path=Path("here"))))


def exits(connection, config, checkpoint, prefix) -> None:
    raise SystemExit(3)


def half(connection, config, checkpoint, prefix) -> None:
    """Ends in the middle of a report."""
    connection.send(_ready())
    os.write(connection.fileno(), struct.pack("!i", 1000) + b"half")
    os.kill(os.getpid(), signal.SIGKILL)


def garbage(connection, config, checkpoint, prefix) -> None:
    """Sends what is no report, and lives on."""
    connection.send(_ready())
    connection.send_bytes(b"no pickle")
    time.sleep(3600)


def puts(connection, config, checkpoint, prefix) -> None:
    """Reports two blocks, leaves a third, and dies."""
    for index, data in enumerate((b"the first", b"the second")):
        media = Media(
            index=index,
            data=shared.put(data, f"{prefix}{index}"),
            mime_type="image/png",
            width=1,
            height=1,
            seed=0,
            sha256="",
        )
        connection.send(media)
    shared.put(b"never reported", f"{prefix}2")
    os.kill(os.getpid(), signal.SIGKILL)


def idle(connection) -> None:
    """The real body of a worker process, around a worker that does nothing."""
    from omni_grpc.worker import process

    class Idle:
        def __init__(self, config, checkpoint, send, prefix) -> None:
            self.send = send

        def start(self) -> None:
            self.send("ready")

        def close(self) -> None: ...

        def vitals(self) -> None: ...

        abandon = close

    process.Worker = Idle
    process.serve(connection, EngineConfig.from_settings(model="toy"), None, "")


def _ready() -> Ready:
    return Ready(pid=os.getpid(), device="cpu", dtype="float32", load_seconds=0.0, weight_bytes=0)


def environment(connection, config, checkpoint, prefix) -> None:
    """Dies of what its environment says of the variable that the checkpoint is named after."""
    value = os.environ[checkpoint.name]
    connection.send(Died(failure=Failure(code=Code.INTERNAL, reason="X", message=value)))
    time.sleep(3600)
