"""A worker without a model, for benchmarks of what is around one: it starts in half a second and takes its time for
steps by sleeping. Outputs follow from their seeds alone, so that whoever runs a job again makes the same bytes.

Its environment says how it is: OMNI_QUICK_STEP is the seconds of a step; with 0 jobs are prepared and then never
take a step, so that a queue only grows.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import os
import random
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

from omni_grpc.config import EngineConfig
from omni_grpc.types import shared_memory as shared
from omni_grpc.types.media import ImageFormat, PreviewImage
from omni_grpc.types.plan import Beat, Decoded, Media, Plan, Prepared, Ready, Report, RequestStep, Stepped
from omni_grpc.types.request import Guidance, Request, Task
from omni_grpc.types.shared_inputs import read_inputs
from omni_grpc.types.spec import Checkpoint, Configs, Defaults, GuidanceKind, Limits, ModelSpec

STEP = "OMNI_QUICK_STEP"
MODEL = "quick"
OUTPUT_BYTES = 20_000
PREVIEWS = 8
"""Pictures that previews take turns with: they are made at their first use, and not while steps are timed."""
BEAT_SECONDS = 1.0


def checkpoint() -> Checkpoint:
    """Text to image, and edits of one image."""
    spec = ModelSpec(
        name="QuickPipeline",
        family="quick",
        tasks=(Task.TEXT_TO_IMAGE, Task.IMAGE_EDIT),
        pipeline="benchmarks.service.quick_worker:none",
        guidance=(GuidanceKind.TRUE_CFG,),
        takes=frozenset({"images"}),
        limits=_limits,
        defaults=_defaults,
    )
    return Checkpoint(name=MODEL, path=Path(MODEL), spec=spec, configs={"scheduler": {"_class_name": "Quick"}})


def _limits(configs: Configs) -> Limits:
    return Limits(
        size_multiple=16, min_size=16, max_size=1024, max_pixels=512 * 512, max_prompt_tokens=77, max_input_images=1
    )


def _defaults(configs: Configs) -> Defaults:
    return Defaults(width=64, height=64, steps=4, guidance=Guidance(true_cfg_scale=4.0))


def serve(connection: Connection, config: EngineConfig, checkpoint: Checkpoint, prefix: str) -> None:
    """Body of the process."""
    worker = QuickWorker(connection, prefix, float(os.environ.get(STEP, "0.02")))
    connection.send(Ready(pid=os.getpid(), device="cpu", dtype="float32", load_seconds=0.0, weight_bytes=0))
    while True:
        # signs of life, as a worker gives them
        while not connection.poll(BEAT_SECONDS):
            connection.send(Beat())
        if (plan := connection.recv()) is None:
            return
        worker.carry_out(plan)


class Reports(Protocol):
    """Where they go: a pipe, or what stands for one."""

    def send(self, report: Report) -> None: ...


class QuickWorker:
    """What the process does, one plan after the other."""

    def __init__(self, connection: Reports, prefix: str, step_seconds: float) -> None:
        self._connection = connection
        self._prefix = prefix
        self._numbers = itertools.count()
        self._step_seconds = step_seconds
        self._requests: dict[str, Request] = {}
        self._steps: dict[str, int] = {}
        self._previews: dict[tuple[int, int, ImageFormat], bytes] = {}

    def carry_out(self, plan: Plan) -> None:
        for job_id in plan.drop:
            self._requests.pop(job_id, None)
        for request in plan.admit:
            # as a worker does before it prepares a request
            read_inputs(request.inputs)
            self._requests[request.id], self._steps[request.id] = request, 0
            self._connection.send(Prepared(id=request.id, elapsed=0.0, prompt_tokens=1, rows=(64,)))
        running = [job_id for job_id in plan.step if job_id in self._requests]
        if running and self._step_seconds:
            time.sleep(self._step_seconds)
            progress = tuple(self._progress(job_id) for job_id in running)
            self._connection.send(Stepped(elapsed=self._step_seconds, progress=progress))
        for job_id in plan.decode:
            if (request := self._requests.pop(job_id, None)) is not None:
                media = tuple(self._output(request, index) for index in range(request.num_outputs))
                self._connection.send(Decoded(id=job_id, elapsed=0.0, media=media))

    def _progress(self, job_id: str) -> RequestStep:
        self._steps[job_id] += 1
        step, total = self._steps[job_id], self._requests[job_id].steps
        sigma = 1 - (step - 1) / total
        return RequestStep(
            id=job_id,
            step=step,
            total=total,
            sigma=sigma,
            timestep=1000 * sigma,
            rows=1,
            finished=step == total,
            previews=self._preview(self._requests[job_id], step),
        )

    def _preview(self, request: Request, step: int) -> tuple[PreviewImage, ...]:
        """A picture that is another one at each step, where the request asks for any."""
        if request.preview is None or step % request.preview.every_steps:
            return ()
        edge, kind = request.preview.max_edge_px, request.preview.format
        number = step % PREVIEWS
        if (number, edge, kind) not in self._previews:
            self._previews[number, edge, kind] = _picture(number, edge, kind)
        return (PreviewImage(0, kind.mime_type, self._previews[number, edge, kind], edge, edge),)

    def _output(self, request: Request, index: int) -> Media:
        data = random.Random(request.seeds[index]).randbytes(OUTPUT_BYTES)
        return Media(
            index=index,
            data=shared.hand(data, self._prefix, next(self._numbers)),
            mime_type=request.output_format.mime_type,
            width=request.width,
            height=request.height,
            seed=request.seeds[index],
            sha256=hashlib.sha256(data).hexdigest(),
        )


def _picture(number: int, edge: int, kind: ImageFormat) -> bytes:
    """A gradient with a square that is elsewhere in each, `edge` pixels on a side."""
    import PIL.Image  # here, since most jobs want none

    picture = PIL.Image.linear_gradient("L").resize((edge, edge)).convert("RGB")
    side = edge // PREVIEWS
    picture.paste((200, 40, 40), (number * side, side, (number + 1) * side, 2 * side))
    file = io.BytesIO()
    picture.save(file, kind.name)
    return file.getvalue()
