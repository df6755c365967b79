"""Counts what happens: an observer of the engines, the calls, the watchers and the webhooks of a server."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Protocol

from omni_grpc.engine import Engine, Job, JobState
from omni_grpc.engine.replica import Replica
from omni_grpc.gate import Gate, Update
from omni_grpc.resolve.work import pixels
from omni_grpc.telemetry import declared
from omni_grpc.telemetry.instruments import Bounded, Counter, Histogram, Instruments
from omni_grpc.types.plan import AdapterFailed, AdapterLoaded, Broken, Report, Stepped
from omni_grpc.webhooks.sender import Attempt

OUTCOMES = ("delivered", "failed", "given_up")
"""What may become of an attempt to deliver a webhook."""
TIMES = ("queue_wait", "encode", "denoise", "decode", "postprocess", "total")
"""Fields of the statistics of a job, each the time of a stage; that of storing comes with its outputs."""
STAGES: Mapping[str, str] = {"queue_wait": "queue", "postprocess": "encode_media"}
"""What a stage is called where its field has another name."""
STORE = "store"
CAUSES = ("WORKER_DIED", "WORKER_HUNG", "WORKER_DRAINED")
"""The usual ones of a restart."""


class Calls(Protocol):
    """What is observed of the calls of a server."""

    open_streams: int

    @property
    def observers(self) -> list[Observer]: ...

    @property
    def open(self) -> int: ...


class Observer(Protocol):
    """Is told of a call that has ended."""

    def __call__(self, stack: str, method: str, code: str, reason: str, seconds: float, /) -> None: ...


class Recorder:
    """It belongs to the loop of its gate."""

    def __init__(self, instruments: Instruments, gate: Gate, calls: Calls) -> None:
        self._instruments = instruments
        self._models = Bounded(declared.MODELS_KEPT)
        self._reasons = Bounded(declared.REASONS_KEPT)
        self._records: dict[str, ModelRecord] = {}
        self._calls = instruments.counter(declared.RPCS)
        self._seconds = instruments.histogram(declared.RPC_SECONDS)
        self._refusals = instruments.counter(declared.REFUSALS)
        self._jobs = instruments.counter(declared.JOBS)
        self._lag = instruments.histogram(declared.WATCH_LAG).of()
        self._updates = instruments.counter(declared.WATCH_EVENTS).of()
        self._coalesced = instruments.counter(declared.COALESCED).of()
        attempts = instruments.counter(declared.WEBHOOK_ATTEMPTS)
        self._attempts = {outcome: attempts.of(outcome) for outcome in OUTCOMES}
        calls.observers.append(self.on_call)
        gate.jobs.on_update.append(self.on_update)
        gate.on_attempt.append(self.on_attempt)
        gate.on_end.append(self.on_end)
        gate.fleet.observe(self._on_engine)

    def on_call(self, stack: str, method: str, code: str, reason: str, seconds: float) -> None:
        self._calls.of(stack, method, code).add()
        self._seconds.of(stack, method).observe(seconds)
        if reason:
            self._refusals.of(self._reasons(reason)).add()

    def on_update(self, update: Update, seconds: float | None) -> None:
        self._updates.add()
        if seconds is not None:
            # the clock may have been set back meanwhile
            self._lag.observe(max(0.0, seconds))
        if update.coalesced:
            self._coalesced.add(update.coalesced)

    def on_attempt(self, attempt: Attempt) -> None:
        self._attempts[attempt.outcome].add()

    def on_end(self, job: Job) -> None:
        """A job has ended. One whose model has gone is counted too."""
        reason = "" if job.failure is None else self._reasons(job.failure.reason)
        record = self._record(job.record.model)
        self._jobs.of(record.model, job.record.task, job.state, reason).add()
        record.on_end(job)

    def _record(self, model: str) -> ModelRecord:
        model = self._models(model)
        found = self._records.get(model)
        if found is None:
            found = self._records[model] = ModelRecord(self._instruments, model, self._reasons)
        return found

    def _on_engine(self, engine: Engine) -> None:
        record = self._record(engine.checkpoint.name)
        engine.on_report.append(functools.partial(record.on_report, engine))
        engine.on_stored.append(record.on_stored)
        engine.on_restart.append(record.on_restart)


class ModelRecord:
    """What happens to one model, over all lives of its engine."""

    def __init__(self, instruments: Instruments, model: str, reasons: Bounded) -> None:
        def counter(metric: declared.Metric) -> Counter:
            return instruments.counter(metric).of(model)

        def histogram(metric: declared.Metric) -> Histogram:
            return instruments.histogram(metric).of(model)

        self.model = model
        self._reasons = reasons
        self._step_times = histogram(declared.STEP_TIMES)
        self._step_requests = histogram(declared.STEP_REQUESTS)
        self._step_rows = histogram(declared.STEP_ROWS)
        self._steps = counter(declared.STEPS)
        self._tokens, self._pixels = counter(declared.TOKENS), counter(declared.PIXELS)
        self._predicted, self._measured = counter(declared.PREDICTED), counter(declared.MEASURED)
        self._frames, self._bytes = counter(declared.FRAMES), counter(declared.OUTPUT_BYTES)
        stages = instruments.histogram(declared.STAGE_TIMES)
        self._stages = {field: stages.of(model, STAGES.get(field, field)) for field in (*TIMES, STORE)}
        broken = instruments.counter(declared.BROKEN)
        self._broken = {phase: broken.of(model, phase) for phase in ("prepare", "step", "decode")}
        self._cached = instruments.counter(declared.CACHED)
        self._outputs = instruments.counter(declared.OUTPUTS)
        self._loras = instruments.counter(declared.LORA_JOBS)
        self._loads = instruments.counter(declared.LORA_LOADS)
        self._restarts = instruments.counter(declared.RESTARTS)
        for cause in CAUSES:
            # one that is there from the start grows by its first restart too
            self._restarts.of(model, cause)

    def on_report(self, engine: Engine, replica: Replica, report: Report) -> None:
        match report:
            case Stepped():
                self._on_stepped(engine, replica, report)
            case Broken():
                self._broken[report.phase].add()
            case AdapterLoaded():
                self._loads.of(self.model, "ok").add()
            case AdapterFailed(failure=failure) if failure.reason != "LORA_UNLOADED":
                self._loads.of(self.model, "failed").add()

    def _on_stepped(self, engine: Engine, replica: Replica, report: Stepped) -> None:
        meter = replica.meter
        rows = tokens = 0
        for job_id in meter.planned_for:
            if (item := engine.held(job_id)) is not None:
                rows += len(item.rows)
                tokens += sum(item.rows)
        self._step_times.observe(report.elapsed)
        self._step_requests.observe(len(meter.planned_for))
        # what is not packed has no tokens that are known here
        self._step_rows.observe(rows or sum(progress.rows for progress in report.progress))
        self._tokens.add(tokens)
        if meter.planned_ms:
            self._predicted.add(meter.planned_ms / 1000)
            self._measured.add(report.elapsed)
        self._steps.add(len(report.progress))
        for progress in report.progress:
            if (item := engine.held(progress.id)) is not None:
                self._pixels.add(pixels(item.request) / progress.segments)
            for count in progress.reports.cache:
                self._cached.of(self.model, count.component, "hit").add(count.hits)
                self._cached.of(self.model, count.component, "miss").add(count.misses)
        if report.broken:
            self._broken["step"].add(len(report.broken))

    def on_stored(self, job: Job, seconds: float) -> None:
        self._stages[STORE].observe(seconds)

    def on_restart(self, replica: Replica, cause: str) -> None:
        self._restarts.of(self.model, self._reasons(cause)).add()

    def on_end(self, job: Job) -> None:
        for lora_id in {lora.lora_id for lora in job.record.spec.request.loras}:
            self._loras.of(self.model, lora_id).add()
        if job.state is not JobState.SUCCEEDED or job.stats is None:
            return
        for field in TIMES:
            self._stages[field].observe(getattr(job.stats, field))
        for artifact in job.artifacts:
            self._outputs.of(self.model, artifact.mime_type.partition("/")[0]).add()
            self._bytes.add(artifact.size_bytes)
            self._frames.add(artifact.num_frames or 1)
