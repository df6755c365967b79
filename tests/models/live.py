"""A real engine with its worker in this process, whose phases a test can hold."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

from torch import Tensor

from omni_grpc.config import EngineConfig
from omni_grpc.engine import Engine, Job, LocalExecutor, Submission
from omni_grpc.pipeline.state import State
from omni_grpc.store.seam import at_once
from omni_grpc.types.events import Event
from omni_grpc.types.request import Draft, Request
from omni_grpc.types.spec import Checkpoint
from omni_grpc.worker.packed import PackedRunner

HANG = 30.0
"""Seconds after which a test that waits is stuck."""

TRIES, PAUSE = 40, 0.05
"""How often, and after how many seconds, a test looks again whether the worker is empty."""

METHODS = {"prepare": "prepare", "step": "predict", "decode": "decode"}
"""Which method of a pipeline is the work of each phase."""


class Gate:
    """Counts the calls of one phase, and can hold one of them at its end: what it made is alive, nobody has seen it."""

    def __init__(self) -> None:
        self.calls = 0
        self.held = 0
        self._reached, self._open = threading.Event(), threading.Event()

    def passed(self) -> None:
        """A call has ended, in the thread of its lane."""
        self.calls += 1
        if self.calls == self.held:
            self._reached.set()
            self._open.wait(HANG)

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._reached.wait, HANG)

    def open(self) -> None:
        self._open.set()


class Live:
    """`latents` has what each finished job decoded, by id, output by output."""

    def __init__(self, engine: Engine, runner: PackedRunner) -> None:
        self.engine = engine
        self.runner = runner
        self._born: list[weakref.ref[Any]] = []
        self.latents: dict[str, list[Tensor]] = {}
        self.gates = {phase: Gate() for phase in METHODS}
        pipeline = runner._pipeline
        pipeline.prepare = self._counting(pipeline.prepare)  # type: ignore[method-assign]
        pipeline.decode = self._keeping(pipeline.decode)  # type: ignore[method-assign]
        for phase, method in METHODS.items():
            setattr(pipeline, method, _gated(getattr(pipeline, method), self.gates[phase]))

    def submit(self, draft: Draft, priority: int = 0) -> Job:
        return self.engine.submit(Submission(draft=draft, priority=priority))[0]

    async def result(self, draft: Draft) -> tuple[list[Tensor], list[bytes]]:
        """Final latents and files of one request, start to end."""
        job = self.submit(draft)
        await ended(job)
        return self.outcome(job)

    def outcome(self, job: Job) -> tuple[list[Tensor], list[bytes]]:
        assert job.state == "SUCCEEDED", job.failure
        return self.latents[job.id], [
            at_once(self.engine.artifacts.data(artifact.artifact_id)) for artifact in job.artifacts
        ]

    def hold(self, phase: str, call: int = 1) -> Gate:
        """Makes the given call of a phase, counted from now, wait for `open`. Once for each phase."""
        gate = self.gates[phase]
        gate.held = gate.calls + call
        return gate

    async def empty(self) -> None:
        """Returns when the worker holds nothing of any request."""
        for _ in range(TRIES):
            if not self.runner._held and not self._held():
                return
            await asyncio.sleep(PAUSE)
        raise AssertionError(f"the worker holds {list(self.runner._held)} and {self._held()} states in all")

    def _held(self) -> int:
        """How many of the states that were prepared are still there."""
        if any(state() is not None for state in self._born):
            gc.collect()
        return sum(state() is not None for state in self._born)

    def _counting(self, prepare: Callable[[Request], list[State]]) -> Callable[[Request], list[State]]:
        def count(request: Request) -> list[State]:
            states = prepare(request)
            self._born += [weakref.ref(state) for state in states]
            return states

        return count

    def _keeping(self, decode: Callable[[State, Tensor], Any]) -> Callable[[State, Tensor], Any]:
        def keep(state: State, latents: Tensor) -> Any:
            self.latents.setdefault(state.request.id, []).append(latents.clone())
            return decode(state, latents)

        return keep


@contextlib.asynccontextmanager
async def live(checkpoint: Checkpoint, **settings: Any) -> AsyncIterator[Live]:
    """An engine that is ready, and closed at the end whatever is held."""
    settings = {"device": "cpu", "cpu_threads": 1, "warm_up_seconds": 0} | settings
    config = EngineConfig.from_settings(model=str(checkpoint.path), **settings)
    executor = LocalExecutor(config, checkpoint)
    engine = Engine(config, checkpoint, executor)
    await engine.start()
    it = Live(engine, executor._worker._runner)  # type: ignore[attr-defined]
    try:
        yield it
    finally:
        for gate in it.gates.values():
            gate.open()
        await engine.close()


async def seen(job: Job, *kinds: type[Event]) -> None:
    """Returns when an event of one of the kinds is in the job's log."""
    async with asyncio.timeout(HANG):
        while not any(isinstance(entry.event, kinds) for entry in job.entries):
            await job.wait(job.last_seq)


async def ended(job: Job) -> None:
    async with asyncio.timeout(HANG):
        while not job.state.terminal:
            await job.wait(job.last_seq)


def _gated(work: Callable[..., Any], gate: Gate) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        made = work(*arguments)
        gate.passed()
        return made

    return call
