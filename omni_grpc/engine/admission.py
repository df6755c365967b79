"""What keeps a server as a whole from taking a job, whatever is asked for, and for how long."""

from __future__ import annotations

from omni_grpc.engine.status import EngineState
from omni_grpc.types.errors import Code, Failure, Unavailable
from omni_grpc.types.load_progress import Loading
from omni_grpc.types.os_errors import plain

MAX_RESTART_PAUSE = 60.0
"""Longest pause between two attempts to start a worker, in seconds."""


def check_loaded(state: EngineState, model: str, loading: Loading) -> None:
    """Raises Unavailable (MODEL_LOADING) before the model is loaded for the first time."""
    if state is EngineState.STARTING:
        raise Unavailable(
            f"model {model!r} is not ready: {loading}; retry, or follow AdminService.LoadModel",
            reason="MODEL_LOADING",
            retry_after=1.0,
            metadata={"phase": loading.phase},
        )


def check_open(state: EngineState, failure: Failure | None, *, parked: bool = False) -> None:
    """Raises Unavailable (ENGINE_DRAINING and others) once the server ends; `failure` says why a model has FAILED.
    While a dead worker is started again, or a model sleeps that jobs wake, jobs are taken and wait in the queue. One
    that is `parked` sleeps until an operator wakes it.
    """
    if parked:
        raise Unavailable("the model was put to sleep; AdminService.Wake wakes it", reason="MODEL_ASLEEP")
    if state is EngineState.FAILED and failure is not None:
        raise Unavailable(f"the model cannot be used: {failure.message}", reason=f"ENGINE_{state}")
    if state not in (EngineState.READY, EngineState.RESTARTING, EngineState.ASLEEP):
        raise Unavailable(f"this server accepts no new jobs: it is {state}", reason=f"ENGINE_{state}", retry_after=1.0)


def stopped_first() -> Failure:
    """The failure of a job that the end of its server has overtaken."""
    message = "the server was stopped before this job ended; send the request again"
    return Failure(code=Code.UNAVAILABLE, reason="SERVER_STOPPED", message=message)


def not_started(error: Exception) -> Failure:
    """The failure of a worker that could not be started: that may pass, like any other death of a worker."""
    message = f"the worker process could not be started: {plain(error)}"
    return Failure(code=Code.UNAVAILABLE, reason="WORKER_NOT_STARTED", message=message)


def restart_pause(first: float, failures: int) -> float:
    """Seconds until a worker is started again: `first`, doubled by every attempt that failed."""
    return min(MAX_RESTART_PAUSE, first * 2.0**failures)
