"""What a step costs beside the denoiser: in the worker, and between worker and engine.

The parts are timed inside of an engine that runs in this process, by wrapping the functions of the runner; the whole is
timed on a server, between the events of its jobs, with nobody watching. Both take the same jobs.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omni_grpc.checkpoint.registry import open_checkpoint
from omni_grpc.client import Client
from omni_grpc.config import EngineConfig
from omni_grpc.engine import Engine, Job, LocalExecutor, Submission
from omni_grpc.types.events import StepProgress
from omni_grpc.types.request import Draft, GuidanceDraft

from .arrivals import STEP, log
from .report import Result
from .server import PATIENCE, Server, served

RUNNER = "omni_grpc.worker.packed"
PARTS: Mapping[str, tuple[str, str]] = {
    # figure -> module, function
    "step": (RUNNER, "PackedRunner.step"),
    "assemble": (RUNNER, "assemble"),
    "guide": ("omni_grpc.pipeline.batch", "_precompute_steps"),
    "advance": (RUNNER, "advance"),
    "finite": (RUNNER, "PackedRunner._refuse_nonfinite"),
    "report": (RUNNER, "PackedRunner._progress"),
}
"""What a step is made of besides `predict`; `step` is all of it, in the worker. `guide` does Euler's step and looks for
what is not finite, too, for all jobs at once; of other schedulers `advance` does that.
"""

Window = tuple[float, float]
"""The time in which every job of a run takes each step, in Unix seconds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numbers:
    size: int = 256
    steps: int = 100
    running: tuple[int, ...] = (1, 8)


def run(checkpoint: Path) -> Result:
    numbers = Numbers()
    with served(checkpoint, "--max-num-seqs", str(max(numbers.running))) as server:
        apart = {running: serve(server, numbers, running) for running in numbers.running}
    return result(numbers, {running: in_process(checkpoint, numbers, running) for running in numbers.running}, apart)


# --- in this process --------------------------------------------------------------------------------------------------


class Clock:
    """The calls of one function: when each began, in Unix seconds, and how long it took."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, float]] = []

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **keywords: Any) -> Any:
            at, began = time.time(), time.perf_counter()
            try:
                return function(*arguments, **keywords)
            finally:
                self.calls.append((at, time.perf_counter() - began))

        return timed

    def milliseconds(self, window: Window, steps: int) -> float:
        """Per step, of the calls that began in the window."""
        return 1000 * sum(taken for at, taken in self.calls if window[0] <= at < window[1]) / steps


def in_process(checkpoint: Path, numbers: Numbers, running: int) -> dict[str, float]:
    """Milliseconds of each part of a step, and of all of it (`wall`), with `running` jobs in every step."""
    return asyncio.run(_in_process(checkpoint, numbers, running))


async def _in_process(path: Path, numbers: Numbers, running: int) -> dict[str, float]:
    checkpoint = open_checkpoint(str(path))
    settings = EngineConfig.from_settings(model=str(path), max_num_seqs=running, warm_up_seconds=0)
    module, _, pipeline = checkpoint.spec.pipeline.partition(":")
    with timed({**PARTS, "predict": (module, f"{pipeline}.predict")}) as clocks:
        engine = Engine(settings, checkpoint, LocalExecutor(settings, checkpoint))
        await engine.start()
        try:
            await _finish(engine, _draft(checkpoint.name, numbers, 0, steps=2))  # pays for what is made at first use
            jobs = await _finish(engine, *(_draft(checkpoint.name, numbers, i) for i in range(running)))
        finally:
            await engine.close()
    stepped = [[entry.time for entry in job.entries if isinstance(entry.event, StepProgress)] for job in jobs]
    window, steps = _shared(stepped)
    return {
        "wall": 1000 * (window[1] - window[0]) / steps,
        **{name: clock.milliseconds(window, steps) for name, clock in clocks.items()},
    }


async def _finish(engine: Engine, *drafts: Draft) -> list[Job]:
    jobs = [engine.submit(Submission(draft=draft))[0] for draft in drafts]
    async with asyncio.timeout(PATIENCE):
        # looked at now and then: to be woken at every event would be measured too
        while not all(job.state.terminal for job in jobs):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    return jobs


def _draft(model: str, numbers: Numbers, seed: int, *, steps: int | None = None) -> Draft:
    return Draft(
        model=model,
        prompt="a red circle",
        negative_prompt="blurry",
        width=numbers.size,
        height=numbers.size,
        steps=steps or numbers.steps,
        guidance=GuidanceDraft(true_cfg_scale=4.0),
        seeds=(seed,),
    )


@contextlib.contextmanager
def timed(parts: Mapping[str, tuple[str, str]]) -> Iterator[dict[str, Clock]]:
    """Times each of the functions for the length of the block."""
    clocks = {name: Clock() for name in parts}
    with contextlib.ExitStack() as undo:
        for name, (module, path) in parts.items():
            owner: Any = importlib.import_module(module)
            *owners, attribute = path.split(".")
            for part in owners:
                owner = getattr(owner, part)
            original = getattr(owner, attribute)
            undo.callback(setattr, owner, attribute, original)
            setattr(owner, attribute, clocks[name].wrap(original))
        yield clocks


# --- on a server ------------------------------------------------------------------------------------------------------


def serve(server: Server, numbers: Numbers, running: int) -> dict[str, float]:
    """Milliseconds of a step on a server: all of it, the worker's part, and the CPU time of the server process."""
    with Client(server.address) as client:
        before = server.cpu_seconds()
        jobs = [
            client.create_job(
                "a red circle",
                negative_prompt="blurry",
                width=numbers.size,
                height=numbers.size,
                steps=numbers.steps,
                true_cfg_scale=4.0,
                seed=seed,
            )
            for seed in range(running)
        ]
        until = time.monotonic() + PATIENCE
        # nobody watches, so that the server has nothing to do but the steps
        while not all(client.get_job(job.job_id).HasField("end_time") for job in jobs) and time.monotonic() < until:
            time.sleep(0.5)
        used = server.cpu_seconds() - before
        events = [[event for event in log(client, job.job_id) if event.HasField(STEP)] for job in jobs]
    window, steps = _shared([[event.time.ToNanoseconds() / 1e9 for event in its] for its in events])
    worker = [
        event.step_progress.step_time.ToNanoseconds() / 1e9
        for event in events[0]
        if window[0] < event.time.ToNanoseconds() / 1e9 <= window[1]
    ]
    return {
        "wall": 1000 * (window[1] - window[0]) / steps,
        "step": 1000 * statistics.fmean(worker),
        "server_cpu": 1000 * used / numbers.steps,
    }


def _shared(stepped: Sequence[Sequence[float]]) -> tuple[Window, int]:
    """From the times of each job's steps: the time in which every job took each of them, and how many those were."""
    begin, end = max(times[0] for times in stepped), min(times[-1] for times in stepped)
    inside = [at for at in stepped[0] if begin <= at <= end]
    if len(inside) < 2:
        raise RuntimeError("the jobs never took two steps together; take more steps")
    return (inside[0], inside[-1]), len(inside) - 1


# --- the report -------------------------------------------------------------------------------------------------------


def result(numbers: Numbers, together: dict[int, dict[str, float]], apart: dict[int, dict[str, float]]) -> Result:
    rows, figures = [], []
    for running in numbers.running:
        inner, outer = together[running], apart[running]
        named = [inner[name] for name in ("predict", *PARTS) if name != "step"]
        rest = inner["step"] - sum(named)
        local, process = inner["wall"] - inner["step"], outer["wall"] - outer["step"]
        worker = inner["step"] - inner["predict"]
        rows.append((str(running), *(f"{value:.2f}" for value in (*named, rest, local, process, worker + process))))
        figures.append(
            {
                "running": running,
                "in_process": {
                    **inner,
                    "rest": rest,
                    "engine": local,
                    "all_but_predict": inner["wall"] - inner["predict"],
                },
                "server": {**outer, "engine_and_pipe": process, "all_but_predict": worker + process},
            }
        )
    return Result(
        columns=(
            *("jobs", "predict", "assemble", "guide and step", "advance", "finite check", "report", "rest of worker"),
            *("engine, in process", "engine and pipe, server", "all but predict, server"),
        ),
        rows=rows,
        figures={"size": numbers.size, "guided": True, "steps": numbers.steps, "milliseconds_per_step": figures},
    )
