"""What a caller asks for, in our own types: every stack translates its messages to these."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

from omni_grpc.types.errors import Violation
from omni_grpc.types.media import ImageInput, Inputs, field_of
from omni_grpc.types.request import Draft, RestartPolicy
from omni_grpc.webhooks import AskedWebhook

PLACEHOLDER = ImageInput(width=0, height=0, channels=0, data=b"")
"""Stands for an input of any kind before it is decoded."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Medium:
    """One input of a request: its path there, its name, which says to what field of Inputs it goes (`field_of`), and
    where its bytes are. At most one of `data`, `uri` and `asset_id` is given; None: not given.
    """

    path: str
    name: str
    data: bytes | None = None
    uri: str | None = None
    asset_id: str | None = None
    mime_type: str = ""
    sha256: bytes = b""


class Delivery(enum.StrEnum):
    """How outputs reach a watcher: their bytes on the stream, by their ids, or by addresses that anybody can get them
    at for a while.
    """

    INLINE_CHUNKS = "INLINE_CHUNKS"
    REFERENCE = "REFERENCE"
    SIGNED_URL = "SIGNED_URL"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """How a job is to be run and told of. Times in seconds, `deadline` in Unix seconds; None: not given.

    `cancels`: whether it ends with its watchers; `interval`: the shortest time between progress events.
    """

    request_id: str = ""
    client_job_id: str = ""
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    priority: int = 0
    queue_timeout: float | None = None
    run_timeout: float | None = None
    deadline: float | None = None
    retention: float | None = None
    cancels: bool | None = None
    disconnect_grace: float | None = None
    delivery: Delivery | None = None
    restart: RestartPolicy | None = None
    webhook: AskedWebhook | None = None
    interval: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request for a generation. The inputs of `draft` are in `media`. `fingerprint` tells it from another request
    with the same request_id; `violations` are what its stack found wrong while translating it.

    `streaming`: the call stays open and watches the job.
    """

    draft: Draft
    options: JobOptions
    streaming: bool
    media: tuple[Medium, ...] = ()
    fingerprint: bytes = b""
    violations: tuple[Violation, ...] = ()

    @property
    def expected(self) -> Inputs:
        """The inputs as they will be, with placeholders for what is not decoded yet."""
        found: dict[str, object] = {}
        for medium in self.media:
            # of a repeated field the path has an index
            several, name = medium.path.endswith("]"), field_of(medium.name)
            found[name] = (*found.get(name, ()), PLACEHOLDER) if several else PLACEHOLDER  # type: ignore[misc]
        return Inputs(**found)  # type: ignore[arg-type]
