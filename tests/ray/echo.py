"""A worker in an actor that tells what it has got: the size of its inputs, and their bytes as outputs."""

import os
import sys

from omni_grpc.engine import ray_driver
from omni_grpc.types import shared_memory as shared
from omni_grpc.types.plan import Decoded, Media, Prepared, Ready, Sleep, Slept, Woken
from omni_grpc.types.shared_inputs import media_of


def serve(connection, config, checkpoint, prefix) -> None:
    """Body of the driver."""
    ray_driver.serve(connection, config, checkpoint, prefix, worker="tests.ray.echo:Echo")


class Echo:
    def __init__(self, config, checkpoint, send, prefix) -> None:
        self.send = send
        self.prefix = prefix
        self.data = b""
        sys.stdout.write("printed in an actor\n")
        sys.stdout.flush()

    def start(self) -> None:
        self.send(Ready(pid=os.getpid(), device="cpu", dtype="float32", load_seconds=0.0, weight_bytes=0))

    def submit(self, plan) -> None:
        for request in plan.admit:
            self.data = b"".join(medium.data for medium in media_of(request.inputs))
            self.send(Prepared(id=request.id, elapsed=0.0, prompt_tokens=len(self.data)))
        for job_id in plan.step:
            self.send(Prepared(id=job_id, elapsed=0.0, prompt_tokens=0))
        for job_id in plan.decode:
            handle = shared.hand(self.data, self.prefix, 0)
            assert handle.data is not None
            media = Media(index=0, data=handle, mime_type="x", width=1, height=1, seed=0, sha256="")
            self.send(Decoded(id=job_id, elapsed=0.0, media=(media,)))

    def order(self, order) -> None:
        self.send(Slept(freed_bytes=7, elapsed=0.0) if isinstance(order, Sleep) else Woken(elapsed=0.0))

    def close(self) -> None: ...
