"""The record of who did what: a line of JSON for each action, each refusal and each end of a job.

A line holds ids, names and sizes that this server knows, never what a caller wrote: no token, prompt, label or message.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Iterator
from typing import Any

from omni_grpc.engine import Job, JobState
from omni_grpc.fleet import Fleet
from omni_grpc.gate.audit_file import AuditFile, stamp
from omni_grpc.types.caller import Caller
from omni_grpc.types.errors import Code, Failure, OmniError
from omni_grpc.types.version import __version__

LONGEST_NAME = 256
"""Characters of a tenant or a subject: an issuer may write long ones."""
_ID = re.compile(r"job_[0-9a-z]{26}|art_[0-9a-z]{26}(_[0-9]{1,9}){0,2}|(asset|profile)-[0-9a-f]{32}|prf_[0-9a-f]{26}")
"""What ids look like: a caller may send anything in place of one."""

About = dict[str, Any]


class Audit:
    """Writes lines to the file of --audit-log; without one, does nothing. It belongs to the fleet's event loop."""

    def __init__(self, fleet: Fleet) -> None:
        """Raises ConfigError for a file that cannot be written."""
        self._fleet = fleet
        path = fleet.config.audit.audit_log
        opened = {"time": stamp(), "action": "LogOpened", "pid": os.getpid(), "version": __version__}
        self._file = None if path is None else AuditFile(path, opened)
        if self._file is not None:
            fleet.on_end.append(self._ended)

    @property
    def on(self) -> bool:
        return self._file is not None

    @contextlib.contextmanager
    def action(self, caller: Caller, name: str, **about: Any) -> Iterator[About]:
        """Writes a line for the block, whatever becomes of it. What the block puts into the dict is in the line."""
        try:
            yield about
        except BaseException as error:
            self._write(name, about, _outcome(error), caller)
            raise
        self._write(name, about, ("OK", None), caller)

    @contextlib.contextmanager
    def refusals(self, caller: Caller, name: str, **about: Any) -> Iterator[None]:
        """Writes a line only where the block refuses: for what changes nothing."""
        try:
            yield
        except OmniError as error:
            self._write(name, about, _outcome(error), caller)
            raise

    def unknown_caller(self, peer: str, call: str, failure: Failure) -> None:
        """Writes a line for a call of which nobody knows who makes it."""
        self._write(
            "Authenticate", {"call": call or None}, (failure.code, failure.reason), Caller(peer=peer), known=False
        )

    def reopen(self) -> None:
        """Goes on in a new file of the same name."""
        if self._file is not None:
            self._file.reopen()

    async def close(self) -> None:
        """Writes what waits, for a few seconds at most."""
        if self._file is not None:
            await asyncio.to_thread(self._file.close, {"time": stamp(), "action": "LogClosed", "pid": os.getpid()})

    def _ended(self, job: Job) -> None:
        about = about_job(job) | {
            "steps": job.step,
            "outputs": len(job.artifacts),
            "size_bytes": sum(artifact.size_bytes for artifact in job.artifacts),
        }
        outcome: tuple[str, str | None] = ("OK", None)
        if job.failure is not None:
            outcome = (job.failure.code, job.failure.reason)
        elif job.state is JobState.CANCELLED:
            # not the reason in the event: callers write that
            outcome = (Code.CANCELLED, "JOB_CANCELLED")
        self._write("JobEnded", about, outcome, Caller(tenant=job.tenant, subject=job.record.subject))

    def _write(
        self, action: str, about: About, outcome: tuple[str, str | None], caller: Caller, *, known: bool = True
    ) -> None:
        if self._file is None:
            return
        code, reason = outcome
        line = {
            "time": stamp(),
            "action": action,
            "tenant": caller.tenant[:LONGEST_NAME] if known else None,
            "subject": caller.subject[:LONGEST_NAME] if known else None,
            "peer": caller.peer or None,
            "outcome": code,
            "reason": reason,
        }
        self._file.write(line | {name: value for name, value in about.items() if self._is_ours(name, value)})

    def _is_ours(self, name: str, value: Any) -> bool:
        """Whether a value is one that this server made, and not any text of a caller."""
        if name == "model":
            return any(value == model.name for model in self._fleet.models)
        if name.endswith("_id"):
            return _ID.fullmatch(value) is not None
        return value is not None


def about_job(job: Job) -> About:
    """The names and sizes of a job."""
    request = job.request
    return {
        "job_id": job.id,
        "model": request.model,
        "task": request.task,
        "width": request.width,
        "height": request.height,
        "num_frames": request.num_frames,
        "num_outputs": request.num_outputs,
        "total_steps": job.total_steps,
    }


def _outcome(error: BaseException) -> tuple[str, str]:
    match error:
        case OmniError():
            return error.failure.code, error.failure.reason
        case asyncio.CancelledError():
            return Code.CANCELLED, "CLIENT_GONE"
        case _:
            return Code.INTERNAL, "INTERNAL"
