"""What is handed to the engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from omni_grpc.types.request import Draft
from omni_grpc.types.results import RequestWarning


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A request and how its job is to be kept. Times in seconds; None takes the configured one.

    `queue_timeout` runs from now until the job starts, `run_timeout` from its start to its end; both begin anew where
    the job goes back to the queue. `deadline` is a moment in Unix seconds that holds for all of it.
    """

    draft: Draft
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    request_id: str = ""
    fingerprint: bytes = b""
    client_job_id: str = ""
    priority: int = 0
    queue_timeout: float | None = None
    run_timeout: float | None = None
    deadline: float | None = None
    retention: float | None = None
    cancel_on_disconnect: bool = False
    disconnect_grace: float | None = None
    warnings: tuple[RequestWarning, ...] = ()
    """What was decided for the caller before the engine saw the request."""
