"""One line of the log for each job that ends, with all that operators look for: whose it was, what, how long, and why
it failed. Prompts are at level DEBUG alone.
"""

from __future__ import annotations

import logging
import math

from omni_grpc.engine import Job
from omni_grpc.store.records import JobState
from omni_grpc.types.log_lines import more

logger = logging.getLogger("omni_grpc.jobs")


def log_end(job: Job) -> None:
    """An observer of jobs that end."""
    level = logging.WARNING if job.state is JobState.FAILED else logging.INFO
    if not logger.isEnabledFor(level):
        return
    fields = _fields(job)
    text = " ".join(f"{name}={_shown(value)}" for name, value in fields.items() if name not in ("job_id", "state"))
    reason = "" if job.failure is None else f": {job.failure.message}"
    logger.log(
        level, "%s %s %s%s", job.id, job.state.value, text, reason, extra=more(always=True, **fields),
    )  # fmt: skip
    if logger.isEnabledFor(logging.DEBUG):
        asked = job.request
        prompts = {"prompt": asked.prompt, "negative_prompt": asked.negative_prompt}
        told = more(always=True, job_id=job.id, **prompts)
        logger.debug("%s prompt=%r negative_prompt=%r", job.id, asked.prompt, asked.negative_prompt, extra=told)


def _fields(job: Job) -> dict[str, object]:
    """By the names that they have in JSON. Times in seconds; what is empty is left out."""
    record, request, stats, trace = job.record, job.request, job.stats, job.record.trace
    found: dict[str, object | None] = {
        "job_id": job.id,
        "state": record.state.value,
        "tenant": record.tenant or None,
        "model": record.model,
        "task": record.task,
        "width": request.width or None,
        "height": request.height or None,
        "frames": request.num_frames or None,
        "outputs": request.num_outputs,
        "steps": None if stats is None else stats.steps_run,
        "total_steps": job.total_steps,
        "reason": None if job.failure is None else job.failure.reason,
        "cancel_reason": record.cancel_reason,
    }
    if stats is not None:
        found |= {
            "queue_s": _rounded(stats.queue_wait),
            "encode_s": _rounded(stats.encode),
            "denoise_s": _rounded(stats.denoise),
            "decode_s": _rounded(stats.decode),
            "postprocess_s": _rounded(stats.postprocess),
            "total_s": _rounded(stats.total),
        }
    found["bytes"] = sum(artifact.size_bytes for artifact in job.artifacts) or None
    found["trace_id"] = None if trace is None else trace.trace_id
    return {name: value for name, value in found.items() if value is not None}


def _rounded(seconds: float) -> float | None:
    return round(seconds, 4) if math.isfinite(seconds) else None


def _shown(value: object) -> str:
    """A value on one line; texts that callers wrote are quoted."""
    text = str(value)
    return text if text and all(sign.isalnum() or sign in "-_.:/" for sign in text) else repr(text)
