"""What the server says of its load while requests run."""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from omni_grpc.client.async_connection import AsyncConnection
from omni_grpc.types.errors import OmniError
from omni_grpc.v1.admin_pb2 import GetServerStatsRequest, ServerStats


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """At one moment, in seconds from the beginning: jobs that wait and run on the server, whoever made them, steps per
    second over the last ten, the predicted wait in seconds, what steps took over what was predicted for them, workers
    that were started again; and the sequences (`rows`) of this run's jobs in their last step.
    """

    time: float
    queued: int
    running: int
    steps_per_second: float
    queue_delay: float | None
    cost_error: float | None
    worker_restarts: int
    rows: int


@dataclasses.dataclass
class Sampled:
    """`failed`: why the server said nothing more, empty where it did to the end."""

    samples: list[Sample] = dataclasses.field(default_factory=list)
    failed: str = ""

    def summary(self) -> dict[str, Any]:
        if not self.samples:
            return {"samples": 0, "failed": self.failed}
        queued, running, rows = ([getattr(it, name) for it in self.samples] for name in ("queued", "running", "rows"))
        errors = [sample.cost_error for sample in self.samples if sample.cost_error]
        return {
            "samples": len(self.samples),
            "queued_mean": statistics.fmean(queued),
            "queued_max": max(queued),
            "running_mean": statistics.fmean(running),
            "running_max": max(running),
            "rows_mean": statistics.fmean(rows),
            "rows_max": max(rows),
            "steps_per_second_max": max(sample.steps_per_second for sample in self.samples),
            "cost_error_median": statistics.median(errors) if errors else None,
            "worker_restarts": self.samples[-1].worker_restarts - self.samples[0].worker_restarts,
            "failed": self.failed,
        }


async def sample(
    connection: AsyncConnection, interval: float, now: Callable[[], float], rows: Callable[[], int], into: Sampled
) -> None:
    """Asks the server every `interval` seconds, until cancelled. A caller who may not ask, or a server that does not
    answer, ends the samples and not the run.
    """
    while True:
        try:
            reply = await connection.unary(connection.admin.GetServerStats, GetServerStatsRequest(), 5.0)
        except OmniError as error:
            into.failed = f"{error.failure.code} {error.reason}: {error.failure.message}"
            return
        into.samples.append(_sample(reply.stats, now(), rows()))
        await asyncio.sleep(interval)


def _sample(stats: ServerStats, time: float, rows: int) -> Sample:
    delay = stats.est_queue_delay.ToNanoseconds() / 1e9 if stats.HasField("est_queue_delay") else None
    return Sample(
        time=round(time, 3),
        queued=stats.queued,
        running=stats.running,
        steps_per_second=round(stats.steps_per_second, 3),
        queue_delay=delay,
        cost_error=round(stats.step_cost.error, 4) if stats.HasField("step_cost") else None,
        worker_restarts=stats.worker_restarts,
        rows=rows,
    )


def as_dicts(samples: Sequence[Sample]) -> list[Mapping[str, Any]]:
    return [dataclasses.asdict(it) for it in samples]
