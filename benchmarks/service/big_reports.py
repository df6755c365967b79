"""A worker without a model whose reports are large, so that a kill often falls into the middle of one."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
from multiprocessing.connection import Connection

from omni_grpc.config import EngineConfig
from omni_grpc.types import shared_memory as shared
from omni_grpc.types.media import PreviewImage
from omni_grpc.types.plan import Decoded, Media, Prepared, Ready, RequestStep, Stepped
from omni_grpc.types.request import Request
from omni_grpc.types.spec import Checkpoint

PREVIEW_BYTES = 4 << 20
"""Of each step's report: more than a pipe holds, so writing and reading it take turns."""
BLOCK_BYTES = 1 << 20


def serve(connection: Connection, config: EngineConfig, checkpoint: Checkpoint, prefix: str) -> None:
    """Every step has a preview of PREVIEW_BYTES, every job an output of BLOCK_BYTES for each seed, in a block."""
    preview = PreviewImage(0, "image/webp", random.Random(0).randbytes(PREVIEW_BYTES), 1024, 1024)
    output = random.Random(1).randbytes(BLOCK_BYTES)
    digest = hashlib.sha256(output).hexdigest()
    names = (f"{prefix}{i}" for i in itertools.count())
    requests: dict[str, Request] = {}
    steps: dict[str, int] = {}
    connection.send(Ready(pid=os.getpid(), device="cpu", dtype="float32", load_seconds=0.0, weight_bytes=0))
    while (plan := connection.recv()) is not None:
        for job_id in plan.drop:
            requests.pop(job_id, None)
        for request in plan.admit:
            requests[request.id], steps[request.id] = request, 0
            connection.send(Prepared(id=request.id, elapsed=0.0, prompt_tokens=1, rows=(64,)))
        if plan.step:
            running = [job_id for job_id in plan.step if job_id in requests]
            for job_id in running:
                steps[job_id] += 1
            progress = tuple(_progress(requests[job_id], steps[job_id], preview) for job_id in running)
            connection.send(Stepped(elapsed=0.001, progress=progress))
        for job_id in plan.decode:
            media = tuple(
                Media(
                    index=index,
                    data=shared.put(output, next(names)),
                    mime_type="image/png",
                    width=64,
                    height=64,
                    seed=seed,
                    sha256=digest,
                )
                for index, seed in enumerate(requests.pop(job_id).seeds)
            )
            connection.send(Decoded(id=job_id, elapsed=0.0, media=media))


def _progress(request: Request, step: int, preview: PreviewImage) -> RequestStep:
    total = request.steps
    sigma = 1 - step / total
    return RequestStep(
        id=request.id,
        step=step,
        total=total,
        sigma=sigma,
        timestep=1000 * sigma,
        rows=1,
        finished=step == total,
        previews=(preview,),
    )
