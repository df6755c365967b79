"""Workers for the executor's tests, each in a real process: what they do follows from the checkpoint's name."""

import dataclasses
import os
import signal
import time
from pathlib import Path

from omni_grpc.types import shared_memory as shared
from omni_grpc.types.errors import Code, Failure
from omni_grpc.types.load_progress import Loading, LoadPhase
from omni_grpc.types.plan import Broken, Fetched, Prepared, Ready


def serve(connection, config, checkpoint, prefix) -> None:
    connection.send(Ready(pid=os.getpid(), device="cpu", dtype="float32", load_seconds=0.0, weight_bytes=0))
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
