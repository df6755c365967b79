"""What `omni-grpc top` shows: a frame made of the server's load and of its jobs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from omni_grpc.client.messages import state_name
from omni_grpc.types.load_progress import size_text
from omni_grpc.v1.admin_pb2 import LoadPhase, ModelLoading, ModelStats, ReplicaStats, ServerStats
from omni_grpc.v1.event_pb2 import JobState
from omni_grpc.v1.job_pb2 import Job
from omni_grpc.v1.model_pb2 import ModelState
from omni_grpc.v1.sampling_pb2 import Task

STYLES: Mapping[str, str] = {
    "READY": "green",
    "LOADING": "yellow",
    "SLEEPING": "blue",
    "FAILED": "red",
    "RUNNING": "green",
    "QUEUED": "cyan",
    "PREEMPTED": "yellow",
}
BAR = 20
"""Columns of a progress bar."""


def frame(stats: ServerStats, jobs: Sequence[Job], *, server: str, rows: int | None = None) -> RenderableType:
    """One frame. `rows`: most jobs that are shown; None: all."""
    parts: list[RenderableType] = [_head(stats, server), _models(stats.models), ""]
    replicas = [(model.model, one) for model in stats.models for one in model.replicas]
    if replicas:
        parts += [_replicas(replicas), ""]
    parts.append(_jobs(jobs if rows is None else jobs[: max(1, rows)], stats, len(jobs)))
    return Group(*parts)


def _head(stats: ServerStats, server: str) -> RenderableType:
    words = [
        f"{stats.running} running",
        f"{stats.queued} of {stats.max_queue} queued",
        f"wait {_delay(stats)}",
        f"{stats.steps_per_second:.1f} steps/s",
        f"{stats.open_streams} streams",
        f"outputs {size_text(stats.artifact_bytes)}",
        f"{stats.worker_restarts} restarts",
    ]
    title = Text(f"omni_grpc  {server}  {stats.time.ToDatetime().strftime('%H:%M:%S')} UTC")
    if stats.draining:
        title.append("  DRAINING", style="bold red")
    return Panel(Text("   ".join(words)), title=title, title_align="left")


def _models(models: Iterable[ModelStats]) -> Table:
    table = _table("model", "state", ">queued", ">running", ">wait", ">work left", "step model")
    for model in models:
        state = ModelState.Name(model.state).removeprefix("MODEL_STATE_")
        cost = model.step_cost
        table.add_row(
            model.model,
            _loading(model.loading) if model.HasField("loading") else _styled(state),
            str(model.queued),
            str(model.running),
            _delay(model),
            f"{model.predicted_work.ToTimedelta().total_seconds():.1f} s",
            f"{cost.fixed_ms:.3g} + {cost.token_ms:.3g} n ms, x {cost.error:.2f}" if cost.fixed_ms else "-",
        )
    return table


def _replicas(replicas: Iterable[tuple[str, ReplicaStats]]) -> Table:
    head = ("replica", "state", ">jobs", ">step", ">jobs/step", ">rows/step", ">device memory", ">host", ">restarts")
    table = _table(*head, "device")
    for model, one in replicas:
        taken = f"{size_text(one.device_used_bytes)} of {size_text(one.device_total_bytes)}"
        table.add_row(
            f"{model}/{one.replica}",
            _styled(one.state),
            str(one.running),
            f"{1000 * one.step_time.ToTimedelta().total_seconds():.1f} ms" if one.HasField("step_time") else "-",
            f"{one.step_jobs:.1f}" if one.step_jobs else "-",
            f"{one.step_rows:.1f}" if one.step_rows else "-",
            taken if one.device_total_bytes else "-",
            _bytes(one.host_memory_bytes),
            str(one.restarts),
            one.device or "-",
        )
    return table


def _jobs(jobs: Iterable[Job], stats: ServerStats, total: int) -> Table:
    table = _table("job", "tenant", "model", "task", "size", "state", "progress", ">step", ">left")
    shown = 0
    for job in jobs:
        shown += 1
        table.add_row(
            job.job_id,
            job.tenant or "-",
            job.model,
            Task.Name(job.task).removeprefix("TASK_").replace("_", " ").lower(),
            _size(job),
            _styled(state_name(job.state)),
            ProgressBar(total=max(1, job.total_steps), completed=job.step, width=BAR),
            f"{job.step}/{job.total_steps}",
            _left(job),
        )
    if shown < total:
        table.add_row(f"and {total - shown} more")
    elif not shown:
        table.add_row(Text("no jobs", style="dim"))
    return table


def in_order(jobs: Iterable[Job]) -> list[Job]:
    """Those that run first, oldest first; then those that wait, in the order in which they leave the queue."""
    return sorted(jobs, key=lambda job: (job.state == JobState.JOB_STATE_QUEUED, job.queue_position, _made(job)))


def plain(stats: ServerStats, jobs: Sequence[Job]) -> Iterator[str]:
    """The frame as lines for programs and files: no boxes, no bars."""
    yield (
        f"server: {stats.running} running, {stats.queued} of {stats.max_queue} queued, wait {_delay(stats)}, "
        f"{stats.steps_per_second:.1f} steps/s, {stats.worker_restarts} restarts" + (", draining" * stats.draining)
    )
    for model in stats.models:
        state = ModelState.Name(model.state).removeprefix("MODEL_STATE_")
        told = f" ({_loading(model.loading)})" if model.HasField("loading") else ""
        counts = f"{model.running} running, {model.queued} queued"
        yield f"model {model.model}: {state}{told}, {counts}, wait {_delay(model)}"
        for one in model.replicas:
            step = f"{1000 * one.step_time.ToTimedelta().total_seconds():.1f} ms" if one.HasField("step_time") else "-"
            yield (
                f"  replica {one.replica}: {one.state}, {one.running} jobs, step {step}, {one.step_jobs:.1f} jobs and "
                f"{one.step_rows:.1f} rows a step, host {_bytes(one.host_memory_bytes)}, {one.restarts} restarts"
            )
    for job in jobs:
        yield (
            f"job {job.job_id}: {state_name(job.state)}, {job.model}, tenant {job.tenant or '-'}, {_size(job)}, "
            f"step {job.step} of {job.total_steps}, {_left(job)}"
        )


def _table(*columns: str) -> Table:
    """A table; names that begin with > are of columns of numbers."""
    table = Table(expand=True, box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column.lstrip(">"), justify="right" if column.startswith(">") else "left", no_wrap=True)
    return table


def _styled(state: str) -> Text:
    return Text(state, style=STYLES.get(state, ""))


def _loading(told: ModelLoading) -> str:
    words = LoadPhase.Name(told.phase).removeprefix("LOAD_PHASE_").replace("_", " ").lower()
    return f"{words} {size_text(told.done_bytes)} of {size_text(told.total_bytes)}" if told.total_bytes else words


def _delay(stats: ServerStats | ModelStats) -> str:
    if not stats.HasField("est_queue_delay"):
        return "-"
    return f"{stats.est_queue_delay.ToTimedelta().total_seconds():.1f} s"


def _bytes(count: int) -> str:
    return size_text(count) if count else "-"


def _size(job: Job) -> str:
    if not job.width:
        return "-"
    frames = f" x {job.num_frames}" if job.num_frames else ""
    return f"{job.width} x {job.height}{frames}"


def _left(job: Job) -> str:
    if job.state == JobState.JOB_STATE_QUEUED:
        return f"{job.queue_position} ahead"
    return f"{job.eta.ToTimedelta().total_seconds():.1f} s" if job.HasField("eta") else "-"


def _made(job: Job) -> int:
    made: int = job.create_time.ToNanoseconds()
    return made
