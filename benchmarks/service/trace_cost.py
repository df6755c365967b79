"""What traces and logs cost a server: CPU time for each job and each step event, apart from each other.

Real server processes with the worker of `quick_worker`, whose steps take hardly any time; all of them are there at once
and take turns, so that a machine that is busy for a while is so for all. Jobs have few or many steps: the difference is
what an event costs. Spans go over gRPC to a collector in this process, which reads nothing; its work is not counted.

`off` sends no traces and logs nothing. Each other way differs from it in one thing. What the event loop itself pays for
a call and for the end of a job is timed in this process: the rest is done by the thread that sends.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from pathlib import Path

import grpc
import psutil
from grpc import aio

from omni_grpc.client.channel import DIRECT
from omni_grpc.config import TracesConfig
from omni_grpc.store.job import Job, new_job_id
from omni_grpc.telemetry.job_log import log_end
from omni_grpc.telemetry.job_log import logger as jobs
from omni_grpc.telemetry.job_spans import job_spans
from omni_grpc.telemetry.otlp import Otlp
from omni_grpc.telemetry.tracing import Tracing
from omni_grpc.types.events import Completed, EncodeDone, Queued, Started, StepProgress
from omni_grpc.types.log_lines import Json, Lines, Text
from omni_grpc.types.media import ImageFormat
from omni_grpc.types.results import Effective, Stats
from omni_grpc.types.trace import TraceContext, read_trace
from omni_grpc.v1 import generation_pb2, generation_pb2_grpc

from .lives import QUICK, started
from .quick_worker import MODEL, STEP
from .report import Result, spread
from .server import PATIENCE
from .store import new_record as stored_record

EXPORT = "opentelemetry.proto.collector.trace.v1.TraceService"
FLAGS = ("--warm-up-seconds", "0", "--max-queue", "1000000", "--max-num-seqs", "8")
QUIET = ("--log-level", "error")
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-"
BATCH = 20
"""Jobs that are sent together."""
DELAY_MS = 100
"""Within which a server sends its spans: a second of a round has as many batches as ten times as long would have."""
OFF, SAMPLED, UNSAMPLED, LOGS, JSON = "off", "traces, sampled", "traces, not sampled", "logs as text", "logs as JSON"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numbers:
    """`jobs` of each number of `steps` in each round, `at_once` at a time. `loops`: how often a part is timed."""

    jobs: int = 200
    steps: tuple[int, int] = (4, 104)
    at_once: int = 8
    rounds: int = 5
    loops: int = 2000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """How a server runs, and what its callers send."""

    flags: Sequence[str]
    parent: str = ""


def run(checkpoint: Path) -> Result:
    return measure(Numbers())


def measure(numbers: Numbers) -> Result:
    with contextlib.ExitStack() as stack:
        collector = stack.enter_context(_collector())
        sends = (*QUIET, "--otlp-endpoint", collector)
        ways = {
            OFF: Way(flags=QUIET),
            SAMPLED: Way(flags=sends, parent=f"{PARENT}01"),
            UNSAMPLED: Way(flags=sends, parent=f"{PARENT}00"),
            LOGS: Way(flags=("--log-level", "info")),
            JSON: Way(flags=("--log-level", "info", "--log-format", "json")),
        }
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        lives = {}
        for number, (name, way) in enumerate(ways.items()):
            made = started(
                QUICK,
                (*FLAGS, *way.flags),
                folder / f"log{number}",
                {STEP: "0.0001", "OTEL_BSP_SCHEDULE_DELAY": str(DELAY_MS)},
            )
            lives[name] = stack.enter_context(made)
        found: dict[str, dict[int, list[float]]] = {name: {steps: [] for steps in numbers.steps} for name in ways}
        for number in range(numbers.rounds + 1):
            for steps in numbers.steps:
                for name, (life, address) in lives.items():
                    cpu = asyncio.run(_round(life.pid, address, ways[name], steps, numbers))
                    if number:  # the first round warms up
                        found[name][steps].append(cpu)
        inside = _inside(collector, numbers)
    return _result(numbers, found, inside)


async def _round(pid: int, address: str, way: Way, steps: int, numbers: Numbers) -> float:
    """Microseconds of the server's CPU for one job."""
    left = iter(range(numbers.jobs))
    metadata = (("traceparent", way.parent),) if way.parent else ()
    async with aio.insecure_channel(address, options=DIRECT) as channel, asyncio.timeout(PATIENCE):
        stub = generation_pb2_grpc.GenerationServiceStub(channel)

        async def client() -> None:
            for seed in left:
                request = generation_pb2.GenerateImageRequest(
                    model=MODEL, prompt="x", width=64, height=64, sampling={"steps": steps, "seed": seed}
                )
                async for _ in stub.GenerateImage(request, metadata=metadata):
                    pass

        before = _cpu_seconds(pid)
        await asyncio.gather(*(client() for _ in range(numbers.at_once)))
        # what is sent later counts too
        await asyncio.sleep(3 * DELAY_MS / 1000)
        return 1e6 * (_cpu_seconds(pid) - before) / numbers.jobs


def _cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


@contextlib.contextmanager
def _collector() -> Iterator[str]:
    """A collector that takes everything and looks at nothing; its address."""
    server = grpc.server(futures.ThreadPoolExecutor(2))
    export = grpc.unary_unary_rpc_method_handler(lambda request, context: b"")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(EXPORT, {"Export": export}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


# --- parts ------------------------------------------------------------------------------------------------------------


def _inside(collector: str, numbers: Numbers) -> Mapping[str, float]:
    """Microseconds of each part, in this process: what the loop pays, and the CPU time of the thread, which makes spans
    of a job and sends them in batches.
    """
    otlp = Otlp(TracesConfig(otlp_endpoint=collector), {}, instance="x")
    tracing = Tracing.of(TracesConfig(otlp_endpoint=collector), {"OTEL_BSP_MAX_QUEUE_SIZE": "1000000"}, instance="x")
    parent = read_trace([f"{PARENT}01"])
    kind = {"rpc.system.name": "grpc", "rpc.method": "omni_grpc.v1.GenerationService/GenerateImage"}
    made = {steps: _ended(steps) for steps in numbers.steps}

    def call() -> None:
        tracing.end(tracing.begin("omni_grpc.v1.GenerationService/GenerateImage", parent, kind), "OK")

    def sent(job: Job) -> None:
        if (why := otlp.send([span for _ in range(BATCH) for span in job_spans(job)])) is not None:
            raise RuntimeError(why)

    wall, cpu = time.perf_counter, time.thread_time
    parts = {
        "loop, call": _timed(call, numbers.loops, wall),
        "loop, end of a job": _timed(lambda: tracing.job_ended(made[numbers.steps[0]]), numbers.loops, wall),
    }
    for steps, job in made.items():
        each = _timed(lambda job=job: sent(job), max(1, numbers.loops // BATCH), cpu) / BATCH
        parts[f"thread, job of {steps} steps"] = each
    tracing.close(60.0)
    otlp.shutdown()
    for name, formatter in (("text", Text("")), ("JSON", Json(""))):
        with _logging(formatter):
            parts[f"loop, line of a job as {name}"] = _timed(
                lambda: log_end(made[numbers.steps[0]]), numbers.loops, wall
            )
    few, many = (parts[f"thread, job of {steps} steps"] for steps in numbers.steps)
    return {**parts, "thread, step": (many - few) / (numbers.steps[1] - numbers.steps[0])}


@contextlib.contextmanager
def _logging(formatter: logging.Formatter) -> Iterator[None]:
    """Lines of jobs are written, to where nobody reads them."""
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        handler = Lines(nowhere)
        handler.setFormatter(formatter)
        jobs.addHandler(handler)
        before, jobs.propagate = jobs.level, False
        jobs.setLevel(logging.INFO)
        try:
            yield
        finally:
            jobs.removeHandler(handler)
            jobs.propagate = True
            jobs.setLevel(before)


def _timed(part: Callable[[], None], loops: int, clock: Callable[[], float]) -> float:
    """Microseconds of a call, the median of many."""
    took = []
    for _ in range(loops):
        began = clock()
        part()
        took.append(clock() - began)
    return 1e6 * statistics.median(took)


def _ended(steps: int) -> Job:
    """A job with so many steps that has succeeded."""
    trace = TraceContext(trace_id=PARENT.split("-")[1], span_id=PARENT.split("-")[2], ours=True)
    record = stored_record(new_job_id())
    spec = dataclasses.replace(record.spec, trace=trace)
    job = Job(dataclasses.replace(record, spec=spec))
    job.append(Queued(position=0, queue_depth=1))
    job.append(Started(model=MODEL, seeds=(1,), width=64, height=64, total_steps=steps, queue_wait=0.0))
    job.append(EncodeDone(elapsed=0.0, prompt_tokens=1))
    for step in range(1, steps + 1):
        job.append(
            StepProgress(
                step=step,
                total_steps=steps,
                sigma=0.5,
                timestep=500.0,
                step_time=0.1,
                elapsed=0.1,
                eta=0.1,
                rows_total=1,
            )
        )
    job.handed = time.time()
    done = Effective(
        width=64,
        height=64,
        steps=steps,
        evals=steps,
        seeds=(1,),
        guidance=spec.request.guidance,
        scheduler="Quick",
        output_format=ImageFormat.PNG,
        attention_backend="sdpa",
    )
    job.append(Completed(artifacts=(), effective=done, warnings=(), stats=Stats(decode=0.01)))
    return job


# --- result -----------------------------------------------------------------------------------------------------------


def _result(
    numbers: Numbers, found: Mapping[str, Mapping[int, Sequence[float]]], inside: Mapping[str, float]
) -> Result:
    few, many = numbers.steps
    rows, figures = [], {}
    for name, rounds in found.items():
        job = [mine - off for mine, off in zip(rounds[few], found[OFF][few], strict=True)]
        event = [
            (mine_many - off_many - mine_few + off_few) / (many - few)
            for mine_few, mine_many, off_few, off_many in zip(
                rounds[few], rounds[many], found[OFF][few], found[OFF][many], strict=True
            )
        ]
        added = ("-", "-") if name == OFF else (spread(job, "us", digits=0), spread(event, "us"))
        rows.append((name, spread(rounds[few], "us", digits=0), spread(rounds[many], "us", digits=0), *added))
        figures[name] = {"rounds": rounds, "added_per_job_us": job, "added_per_event_us": event}
    rows += [(f"part: {name}", f"{took:.1f} us", "-", "-", "-") for name, took in inside.items()]
    return Result(
        columns=("server", f"CPU of a job of {few} steps", f"of {many} steps", "added per job", "added per event"),
        rows=rows,
        figures={"numbers": dataclasses.asdict(numbers), "ways": figures, "parts_us": dict(inside)},
    )
