"""Does a watcher that hardly reads hold up one that does? Both watch the same job, with a preview on every step.

The previews are large ones (PNG), because gRPC holds about 4 MB for a reader before the server notices that it is slow.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import statistics
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc

from omni_grpc.cli.bench.figures import quantile
from omni_grpc.client import Client, ImageOptions
from omni_grpc.client.channel import options_for
from omni_grpc.client.messages import image_request
from omni_grpc.v1.job_pb2 import CreateJobRequest
from omni_grpc.v1.job_pb2_grpc import JobServiceStub
from omni_grpc.v1.media_pb2 import IMAGE_FORMAT_PNG

from .arrivals import STEP, Arrival, arrival, in_order, log, states
from .report import Result, spread
from .server import PATIENCE, Server, served

SAMPLE_SECONDS = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numbers:
    rounds: int = 6
    size: int = 128
    steps: int = 200
    pause: float = 0.25
    """Seconds that the slow watcher sleeps after each event, until the fast one has seen the end."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Round:
    """Lags of the fast watcher's step events, in milliseconds; what the slow one got; growth of the server's memory."""

    lags: list[float]
    growth_bytes: int
    slow: list[Arrival] = dataclasses.field(default_factory=list)
    states: list[int] = dataclasses.field(default_factory=list)


def run(checkpoint: Path) -> Result:
    with served(checkpoint) as server:
        return measure(server, Numbers())


def measure(server: Server, numbers: Numbers) -> Result:
    alone, beside = [], []
    options = options_for(server.address)
    with Client(server.address) as client, grpc.insecure_channel(server.address, options=options) as channel:
        request = _request(client.list_models()[0].name, numbers)
        create = JobServiceStub(channel).CreateJob

        def start() -> str:
            job_id: str = create(request, timeout=PATIENCE).job.job_id
            return job_id

        _alone(server, client, start())  # pays for what is made at first use, and fills the server's pools
        for _ in range(numbers.rounds):
            alone.append(_alone(server, client, start()))
            beside.append(_beside(server, client, start, numbers.pause))
    return _result(alone, beside)


def _request(model: str, numbers: Numbers) -> CreateJobRequest:
    """The client asks for WebP, so the format is set here."""
    options = ImageOptions(width=numbers.size, height=numbers.size, steps=numbers.steps, seed=1, preview_every_steps=1)
    request = image_request(model, "a red circle", options)
    request.options.preview.format = IMAGE_FORMAT_PNG
    request.options.ClearField("request_id")  # each call makes a job of its own
    return CreateJobRequest(generate_image=request)


def _alone(server: Server, client: Client, job_id: str) -> Round:
    before = server.rss_bytes()
    with _rss(server) as samples:
        fast = _watch(client, job_id)
    return Round(lags=_lags(fast), growth_bytes=max(samples) - before)


def _beside(server: Server, client: Client, start: Callable[[], str], pause: float) -> Round:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    # started before the job, because a process takes longer to start than the job may take
    watcher = context.Process(target=_watch_slowly, args=(theirs, server.address, pause), daemon=True)
    watcher.start()
    try:
        _receive(ours)
        before = server.rss_bytes()
        with _rss(server) as samples:
            job_id = start()
            ours.send(job_id)
            fast = _watch(client, job_id)
            ours.send(None)
            slow: list[Arrival] = _receive(ours)
    finally:
        watcher.kill()
        watcher.join()
    # until the slow one is there, it holds nobody up
    return Round(
        lags=_lags(fast, since=slow[0].arrived),
        growth_bytes=max(samples) - before,
        slow=slow,
        states=states(log(client, job_id)),
    )


def _watch(client: Client, job_id: str) -> list[Arrival]:
    return [arrival(event) for event in client.watch_job(job_id, timeout=PATIENCE)]


def _lags(arrivals: list[Arrival], since: float = 0.0) -> list[float]:
    """Of the steps that happened while it watched, and after `since`."""
    since = max(since, arrivals[0].arrived)
    return [1000 * one.lag for one in arrivals if one.kind == STEP and one.sent > since]


def _watch_slowly(connection: Any, address: str, pause: float) -> None:
    """Body of the slow watcher's process: waits for a job, watches it, slowly until it is told that the job has ended,
    and sends back what came.
    """
    with Client(address) as client:
        client.server_info()  # connects
        connection.send(None)
        arrivals, hurry = [], False
        for event in client.watch_job(connection.recv(), timeout=PATIENCE):
            arrivals.append(arrival(event))
            hurry = hurry or connection.poll(pause)
    connection.send(arrivals)


def _receive(connection: Any) -> Any:
    if not connection.poll(PATIENCE):
        raise TimeoutError(f"the slow watcher has said nothing for {PATIENCE:.0f} s")
    return connection.recv()


@contextlib.contextmanager
def _rss(server: Server) -> Iterator[list[int]]:
    """Samples of the server's resident memory during the block, at least one."""
    samples = [server.rss_bytes()]
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(SAMPLE_SECONDS):
            samples.append(server.rss_bytes())

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()
        samples.append(server.rss_bytes())


def _result(alone: list[Round], beside: list[Round]) -> Result:
    lags = {"alone": [x for it in alone for x in it.lags], "beside": [x for it in beside for x in it.lags]}
    p99 = {how: quantile(its, 0.99) for how, its in lags.items()}
    lost = sum(len(set(it.states) - {one.seq for one in it.slow}) for it in beside)
    coalesced = [sum(one.coalesced for one in it.slow) for it in beside]
    received = [sum(one.kind == STEP for one in it.slow) for it in beside]
    size = statistics.fmean(one.size for it in beside for one in it.slow if one.kind == STEP)
    growth = {how: [it.growth_bytes / 1e6 for it in its] for how, its in (("alone", alone), ("beside", beside))}
    problems = [f"the slow watcher lost {lost} state events"] if lost else []
    if not all(in_order(it.slow) for it in beside):
        problems.append("the slow watcher got events out of order")
    rows = [
        (
            label,
            str(len(lags[how])),
            f"{quantile(lags[how], 0.5):.2f} ms",
            f"{p99[how]:.2f} ms",
            spread([quantile(it.lags, 0.99) for it in its], "ms", 2),
            spread(growth[how], "MB"),
        )
        for how, label, its in (("alone", "alone", alone), ("beside", "beside a slow one", beside))
    ]
    rows.append(("ratio of p99", "", "", f"{p99['beside'] / p99['alone']:.2f}", "", ""))
    rows.append(
        ("slow one: steps received, left out", spread(received, digits=0), spread(coalesced, digits=0), "", "", "")
    )
    return Result(
        columns=("fast watcher", "step events", "lag p50", "lag p99", "p99 by round", "server memory growth"),
        rows=rows,
        figures={
            "lag_p99_ms": p99,
            "lag_p99_ms_by_round": {
                how: [quantile(it.lags, 0.99) for it in its] for how, its in (("alone", alone), ("beside", beside))
            },
            "lag_p50_ms": {how: quantile(its, 0.5) for how, its in lags.items()},
            "ratio_of_p99": p99["beside"] / p99["alone"],
            "slow_steps_received": received,
            "slow_steps_coalesced": coalesced,
            "slow_state_events_lost": lost,
            "bytes_per_step_event": size,
            "server_growth_mb": growth,
        },
        problems=problems,
    )
