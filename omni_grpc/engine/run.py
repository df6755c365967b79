"""One job while it is alive in the engine: turns the worker's reports into the events and statistics that users see."""

from __future__ import annotations

import time
from collections.abc import Mapping

from omni_grpc.store.job import Job
from omni_grpc.types.effective import effective
from omni_grpc.types.errors import Failure
from omni_grpc.types.events import (
    Completed,
    DecodeProgress,
    EncodeDone,
    Preempted,
    Resumed,
    Retrying,
    Started,
    StepProgress,
)
from omni_grpc.types.findings import WorkerFindings
from omni_grpc.types.plan import Decoded, DecodedPart, Media, Prepared, RequestStep, VisitedLevels
from omni_grpc.types.results import Artifact, RequestWarning, Stats
from omni_grpc.types.step_cache import CacheCount, tally

MAX_ATTEMPTS = 2
"""Attempts that a job gets: the scheduler requeues it once."""


class JobRun:
    """The clock and the counters of one job. Times in seconds."""

    def __init__(self, job: Job) -> None:
        self.job = job
        # one that was restored has a past
        self.attempt = 1 + sum(isinstance(entry.event, Retrying) for entry in job.entries)
        self.step = 0
        self._clock = time.monotonic
        self._created = self._clock() - max(0.0, job.clock() - job.record.create_time)
        self._started: float | None = None
        self._denoise_started = 0.0
        self._aside = 0.0
        self._preempted_at = 0.0
        self._encode = 0.0
        self._denoise = 0.0
        self._decode = 0.0
        self._postprocess = 0.0
        self._evals = 0
        self._steps_cached = 0
        self._cache: dict[str, CacheCount] = {}
        self.decoded_parts = 0
        self._peak_memory = 0
        self._stage_durations: Mapping[str, float] = {}
        self._dropped_tokens: dict[str, int] = {}
        self._levels = VisitedLevels()
        self._artifacts: list[Artifact] = []
        self._late_warnings: tuple[RequestWarning, ...] = ()

    def started(self) -> Started:
        self._started = self._clock()
        request = self.job.request
        return Started(
            model=request.model,
            seeds=request.seeds,
            width=request.width,
            height=request.height,
            total_steps=self.job.total_steps,
            queue_wait=self._started - self._created,
            warnings=self.job.warnings,
            attempt=self.attempt,
        )

    def retrying(self, failure: Failure, delay: float) -> Retrying:
        self.attempt += 1
        # what the lost attempt did is not what was done for the result
        self.step = self._evals = self._steps_cached = 0
        self._cache = {}
        return Retrying(failure=failure, attempt=self.attempt, max_attempts=MAX_ATTEMPTS, delay=delay)

    def encoded(self, report: Prepared) -> EncodeDone:
        self._encode = report.elapsed
        self._denoise_started = self._clock()
        self._dropped_tokens = dict(report.dropped_tokens)
        self._levels = report.levels
        return EncodeDone(elapsed=report.elapsed, prompt_tokens=report.prompt_tokens)

    def stepped(self, progress: RequestStep, elapsed: float) -> StepProgress:
        self._denoise = self._clock() - self._denoise_started - self._aside
        self._evals += progress.evals
        cache = progress.reports.cache
        self._steps_cached += bool(cache) and not any(count.misses for count in cache)
        for count in cache:
            tally(self._cache, count.component, count)
        # a pipeline may have nothing to denoise
        mean = self._denoise / max(1, progress.step)
        return StepProgress(
            step=progress.step,
            total_steps=progress.total,
            sigma=progress.sigma,
            timestep=progress.timestep,
            step_time=progress.earlier + elapsed,
            elapsed=self._denoise,
            eta=mean * (progress.total - progress.step),
            rows_total=progress.rows,
            rows_reused=progress.reports.rows_reused,
            evals=progress.evals,
            segment=progress.segment,
            total_segments=progress.segments,
        )

    def take_step(self, progress: RequestStep, elapsed: float) -> None:
        """Adds the events of one step to the log."""
        event = self.stepped(progress, elapsed)
        self.step = progress.step
        entry = self.job.append(event)
        if progress.previews:
            self.job.previews, self.job.preview_seq = progress.previews, entry.seq
        if progress.finished:
            units = progress.segments if progress.segments > 1 else self.job.request.num_outputs
            self.job.append(DecodeProgress(done_units=self.decoded_parts, total_units=units))

    def decoded_part(self, report: DecodedPart) -> DecodeProgress:
        self._decode += report.elapsed
        self.decoded_parts = report.done
        return DecodeProgress(done_units=report.done, total_units=report.total)

    def preempted(self, reason: str, position: int) -> Preempted:
        self._preempted_at = self._clock()
        return Preempted(completed_steps=self.step, reason=reason, position=position)

    def resumed(self) -> Resumed:
        wait = self._clock() - self._preempted_at
        self._aside += wait
        return Resumed(completed_steps=self.step, wait=wait)

    def artifact(self, media: Media) -> Artifact:
        parts = [str(part) for part in (media.index, media.layer) if part is not None]
        # a server that was thought dead may store, or throw away, the output that it made itself
        if restarts := self.job.record.restarts:
            parts.insert(0, f"r{restarts}")
        artifact = Artifact(
            artifact_id="_".join(["art", self.job.id.removeprefix("job_"), *parts]),
            job_id=self.job.id,
            index=media.index,
            mime_type=media.mime_type,
            size_bytes=media.data.size,
            sha256=media.sha256,
            width=media.width,
            height=media.height,
            seed=media.seed,
            num_frames=media.num_frames,
            fps=media.fps,
            sample_rate_hz=media.sample_rate,
            duration=media.duration,
            has_alpha=media.has_alpha,
            layer=media.layer,
        )
        self._artifacts.append(artifact)
        return artifact

    def done(self, report: Decoded, scheduler: str, found: WorkerFindings) -> Completed:
        """The job's last event. `found`: what the worker found out about the model, which goes into `effective`."""
        self._decode += report.elapsed - report.encoding
        self._postprocess = report.encoding
        self._peak_memory = report.peak_memory_bytes
        self._stage_durations = report.stage_durations
        self._late_warnings = report.warnings
        done = effective(
            self.job.request,
            self._artifacts[0] if self._artifacts else None,
            # those of each part: what it takes to ask for the same again
            steps=self.step // self.job.segments if report.steps is None else report.steps,
            evals=self._evals,
            scheduler=scheduler,
            found=found,
            defaults_used=self.job.record.spec.defaults_used,
            dropped_tokens=self._dropped_tokens,
            levels=self._levels,
        )
        return Completed(
            artifacts=tuple(self._artifacts), effective=done, warnings=self._warnings(), stats=self.stats()
        )

    def _warnings(self) -> tuple[RequestWarning, ...]:
        cut = (
            RequestWarning(
                code="PROMPT_TRUNCATED",
                field=field,
                message=f"the prompt is too long for the model: its last {dropped} tokens were truncated",
                applied=str(dropped),
            )
            for field, dropped in self._dropped_tokens.items()
            if dropped
        )
        return (*self.job.warnings, *cut, *self._late_warnings)

    def stats(self) -> Stats:
        now = self._clock()
        return Stats(
            queue_wait=(self._started if self._started is not None else now) - self._created,
            encode=self._encode,
            denoise=self._denoise,
            decode=self._decode,
            postprocess=self._postprocess,
            total=now - self._created,
            steps_run=self.step,
            steps_cached=self._steps_cached,
            cache=tuple(self._cache.values()),
            peak_memory_bytes=self._peak_memory,
            stage_durations=self._stage_durations,
        )
