"""A worker that gives up by itself at its first request, in a real process, as one does whose lane breaks."""

import os

from omni_grpc.types.errors import Code, Failure
from omni_grpc.types.plan import Died, Ready


def serve(connection, config, checkpoint, prefix) -> None:
    connection.send(Ready(pid=os.getpid(), device="cpu", dtype="float32", load_seconds=0.0, weight_bytes=0))
    # it goes on reading plans, as the real one does
    while (plan := connection.recv()) is not None:
        if plan.admit:
            connection.send(Died(failure=Failure(code=Code.INTERNAL, reason="WORKER_ERROR", message="a lane broke")))
