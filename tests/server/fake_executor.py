"""A worker without a model: it answers plans through the same seam as the real one, and the test holds its lanes."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import io
import itertools
import random
import secrets
from collections.abc import Coroutine

import PIL.Image

from omni_grpc.engine.executor import Deliver
from omni_grpc.engine.scheduler import Lane
from omni_grpc.types import shared_memory as shared
from omni_grpc.types.errors import Code, Failure
from omni_grpc.types.lora import Adapter
from omni_grpc.types.media import ImageFormat, PreviewImage
from omni_grpc.types.plan import (
    AdapterFailed,
    AdapterLoaded,
    AdapterUnloaded,
    Broken,
    CostModel,
    Decoded,
    Died,
    EndRecording,
    LoadAdapter,
    Media,
    Order,
    Plan,
    Prepared,
    ProfileFileKind,
    Ready,
    Record,
    Recorded,
    RecordedFile,
    RecordingEnd,
    RequestStep,
    Sleep,
    Slept,
    Stepped,
    UnloadAdapter,
    Unmoved,
    Woken,
)
from omni_grpc.types.request import Request
from omni_grpc.types.shared_inputs import read_inputs
from omni_grpc.types.step_cache import CacheCount, StepReports

COST = CostModel(fixed=2.0, token=0.25, pair=0.125)
READY = Ready(pid=1, device="cpu", dtype="float32", load_seconds=0.1, weight_bytes=1234, cost=COST)


class Gate:
    """What work must pass. Open at first; when closed, `let` admits a number of pieces."""

    def __init__(self) -> None:
        self._credits: float = float("inf")
        self._changed = asyncio.Event()

    def close(self) -> None:
        self._credits = 0

    def open(self) -> None:
        self.let(float("inf"))

    def let(self, count: float) -> None:
        self._credits += count
        self._changed.set()

    async def enter(self) -> None:
        while self._credits < 1:
            self._changed.clear()
            await self._changed.wait()
        self._credits -= 1


class FakeExecutor:
    """Outputs are noise made from their seed: equal seeds give equal bytes, and a PNG is as large as its pixels.

    It can be started again after a death; `starts` counts its lives. `ready` is what it says of itself. Its step cache
    answers every row of every step but the first and the last.
    """

    def __init__(self, ready: Ready = READY) -> None:
        self.ready = ready
        self.loading = Gate()
        self.gates = {lane: Gate() for lane in Lane}
        self.starts = 0
        self.orders: list[Order] = []
        self.asleep = False
        self.moving = Gate()
        self.ranks = 1
        self.adapting = Gate()
        self.adapters: dict[str, Adapter] = {}
        """What it has loaded on order, by uid."""
        self.unloadable: dict[str, Failure] = {}
        """Ids of adapters that it cannot load."""
        self.recording: Record | None = None
        self._recorded = 0
        self.stuck: Failure | None = None
        """Why the next order cannot be carried out."""
        self._alive = False
        self.plans: list[Plan] = []
        self.failures: dict[Lane, Failure] = {}
        """The failure of the next piece of work in a lane."""
        self._requests: dict[str, Request] = {}
        self._steps: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._blocks = (f"omni-fake-{secrets.token_hex(4)}-{i}" for i in itertools.count())

    def start(self, deliver: Deliver) -> None:
        self.starts += 1
        self._deliver = deliver
        self._spawn(self._load())

    def submit(self, plan: Plan) -> None:
        if not self._alive:
            # as with a pipe whose other end is gone
            return
        assert not self.asleep or not (plan.admit or plan.step or plan.decode), "work for a worker without its weights"
        # what is in shared memory is copied out, as a worker does before it prepares a request
        admitted = (dataclasses.replace(request, inputs=read_inputs(request.inputs)) for request in plan.admit)
        plan = dataclasses.replace(plan, admit=tuple(admitted))
        self.plans.append(plan)
        for job_id in plan.drop:
            self._requests.pop(job_id, None)
        for request in plan.admit:
            own = {adapter.key for adapter in self.ready.found.loras}
            assert all(lora.key in self.adapters or lora.key in own for lora in request.loras), "it lacks an adapter"
            self._requests[request.id] = request
            self._steps[request.id] = 0
            self._spawn(self._prepare(request))
        if plan.step:
            self._spawn(self._step(plan.step))
        for job_id in plan.decode:
            self._spawn(self._decode(self._requests[job_id]))

    def order(self, order: Order) -> None:
        if self._alive:
            self.orders.append(order)
            match order:
                case Record():
                    self.recording, self._recorded = order, 0
                case EndRecording():
                    self._end_recording(order.end)
                case LoadAdapter():
                    self._spawn(self._load_adapter(order))
                case UnloadAdapter():
                    self.adapters.pop(order.uid, None)
                    self._deliver(AdapterUnloaded(uid=order.uid))
                case _:
                    self._spawn(self._move(order))

    async def _load_adapter(self, order: LoadAdapter) -> None:
        await self.adapting.enter()
        if (failure := self.unloadable.get(order.id)) is not None:
            self._deliver(AdapterFailed(uid=order.uid, failure=failure))
            return
        known = {"id": order.id, "uid": order.uid, "file": order.path, "sha256": order.sha256, "pinned": order.pinned}
        applied = {"transformer": 2}
        adapter = Adapter(format=order.format or "peft", rank=4, size_bytes=9, applied=applied, nbytes=100, **known)
        self.adapters[order.uid] = adapter
        self._deliver(AdapterLoaded(adapter=adapter, elapsed=0.5))

    def _end_recording(self, end: RecordingEnd) -> None:
        """Its trace says how many steps it has."""
        if (order := self.recording) is not None:
            self.recording = None
            trace = RecordedFile(
                kind=ProfileFileKind.TRACE, data=shared.put(b"%d steps" % self._recorded, next(self._blocks))
            )
            files = (trace,) if self._recorded else ()
            self._deliver(Recorded(id=order.id, end=end, steps=self._recorded, files=files))
            for rank in range(1, self.ranks if order.all_ranks else 1):
                self._deliver(Recorded(id=order.id, end=end, steps=self._recorded, rank=rank))

    async def _move(self, order: Order) -> None:
        await self.moving.enter()
        if (failure := self.stuck) is not None:
            self.stuck = None
            self._deliver(Unmoved(failure=failure))
            return
        self.asleep = isinstance(order, Sleep)
        if isinstance(order, Sleep):
            self._deliver(Slept(freed_bytes=self.ready.device_bytes, elapsed=0.01))
        else:
            self._deliver(Woken(elapsed=0.01))

    async def close(self) -> None:
        await self._end()

    def kill(self) -> None:
        self._killing = asyncio.ensure_future(self.die("WORKER_HUNG", "the worker process 1 hung and was killed"))

    async def die(
        self, reason: str = "WORKER_DIED", message: str = "the worker process 1 ended by signal SIGKILL"
    ) -> None:
        """What happens to a worker that is killed: all it held is gone."""
        await self._end()
        self._alive, self.recording = False, None
        self.adapters.clear()
        self._requests.clear()
        self._deliver(Died(failure=Failure(code=Code.UNAVAILABLE, reason=reason, message=message)))

    async def _load(self) -> None:
        await self.loading.enter()
        self._alive, self.asleep = True, False
        self._deliver(self.ready)

    async def _prepare(self, request: Request) -> None:
        await self.gates[Lane.PREPARE].enter()
        if not self._breaks(Lane.PREPARE, request.id):
            words = len(request.prompt.split())
            rows = (tokens(request),) * _rows(request)
            self._deliver(Prepared(id=request.id, elapsed=0.01, prompt_tokens=words, rows=rows))

    async def _step(self, ids: tuple[str, ...]) -> None:
        await self.gates[Lane.STEP].enter()
        ids = tuple(job_id for job_id in ids if job_id in self._requests)
        if (failure := self.failures.pop(Lane.STEP, None)) is not None:
            broken = tuple(Broken(id=job_id, phase=Lane.STEP, failure=failure) for job_id in ids)
            self._deliver(Stepped(elapsed=0.01, broken=broken))
        else:
            self._deliver(Stepped(elapsed=0.01, progress=tuple(map(self._progress, ids))))
        if (order := self.recording) is not None and (not order.job_id or order.job_id in ids):
            self._recorded += 1
            if self._recorded == order.num_steps:
                self._end_recording(RecordingEnd.STEPS)

    def _progress(self, job_id: str) -> RequestStep:
        self._steps[job_id] += 1
        step, request = self._steps[job_id], self._requests[job_id]
        sigma = 1 - (step - 1) / request.steps
        answered = request.cache is not None and 1 < step < request.steps
        return RequestStep(
            id=job_id,
            step=step,
            total=request.steps,
            sigma=sigma,
            timestep=1000 * sigma,
            rows=_rows(request),
            reports=StepReports(rows_reused=_rows(request) if answered else 0, cache=_cache(request, answered)),
            finished=step == request.steps,
            previews=previews(request, step),
        )

    async def _decode(self, request: Request) -> None:
        await self.gates[Lane.DECODE].enter()
        if not self._breaks(Lane.DECODE, request.id):
            media = tuple(self._media(request, index) for index in range(request.num_outputs))
            self._deliver(Decoded(id=request.id, elapsed=0.01, media=media, peak_memory_bytes=4321))

    def _media(self, request: Request, index: int) -> Media:
        data = picture(request.width, request.height, request.seeds[index], request.output_format)
        return Media(
            index=index,
            data=shared.put(data, next(self._blocks)),
            mime_type=request.output_format.mime_type,
            width=request.width,
            height=request.height,
            seed=request.seeds[index],
            sha256=hashlib.sha256(data).hexdigest(),
        )

    def _breaks(self, lane: Lane, job_id: str) -> bool:
        failure = self.failures.pop(lane, None)
        if failure is not None:
            self._deliver(Broken(id=job_id, phase=lane, failure=failure))
        return failure is not None

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def tokens(request: Request) -> int:
    """Of one row: patches of 16 x 16 pixels, and words."""
    return request.width * request.height // 256 + len(request.prompt.split())


def _rows(request: Request) -> int:
    return request.num_outputs * (1 if request.negative_prompt is None else 2)


def _cache(request: Request, answered: bool) -> tuple[CacheCount, ...]:
    if request.cache is None:
        return ()
    hits, misses = (_rows(request), 0) if answered else (0, _rows(request))
    return (
        CacheCount(
            component="transformer",
            method="tea_cache",
            hits=hits,
            misses=misses,
            blocks=hits + misses,
            blocks_run=misses,
            measured=1,
            change=0.25,
        ),
    )


def previews(request: Request, step: int) -> tuple[PreviewImage, ...]:
    """One for each output, where this step has some: no two are equal."""
    asked = request.preview
    if asked is None or step % asked.every_steps:
        return ()
    edge = asked.max_edge_px
    return tuple(
        PreviewImage(i, asked.format.mime_type, picture(edge, edge, 1000 * step + i, asked.format), edge, edge)
        for i in range(request.num_outputs)
    )


def picture(width: int, height: int, seed: int, format: ImageFormat) -> bytes:
    pixels = random.Random(seed).randbytes(width * height * 3)
    if format is ImageFormat.RAW_RGB8:
        return pixels
    buffer = io.BytesIO()
    PIL.Image.frombytes("RGB", (width, height), pixels).save(buffer, format.value)
    return buffer.getvalue()
