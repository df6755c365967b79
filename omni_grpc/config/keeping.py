"""Settings of what a server keeps: where, for how long and how much."""

from __future__ import annotations

import dataclasses
from urllib.parse import urlsplit

from omni_grpc.config.options import setting
from omni_grpc.types.errors import ConfigError, Violation

MINUTE, DAY = 60.0, 24 * 3600.0
GIB = 1 << 30


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """Where jobs, their outputs and uploads are kept. Without any of these, in memory: gone with the process."""

    state_dir: str | None = setting(
        None,
        "folder in which jobs, outputs and uploads outlive the server: a SQLite database, which one server at a time "
        "can have, and files",
        empty="give a folder, or leave it out for jobs in memory",
    )
    state_url: str | None = setting(
        None,
        "postgresql://USER:PASSWORD@HOST/DATABASE that keeps the jobs in place of --state-dir; several servers can "
        "share it",
        empty="give an address, or leave it out",
    )
    artifact_url: str | None = setting(
        None,
        "where outputs and uploads are kept: a folder, or s3://BUCKET/PREFIX (default: in --state-dir)",
        empty="give an address, or leave it out",
    )
    signed_url_seconds: float = setting(
        3600.0, "seconds for which an address of ARTIFACT_DELIVERY_SIGNED_URL can be used", minimum=1
    )
    lease_seconds: float = setting(
        10.0,
        "several servers: seconds without a sign of life after which the others take over the jobs of one",
        minimum=1,
    )

    def __post_init__(self) -> None:
        if self.state_url is not None:
            if urlsplit(self.state_url).scheme not in ("postgresql", "postgres"):
                raise _refused("state_url", "is no postgresql:// address; for a folder use --state-dir")
            if self.artifact_url is None and self.state_dir is None:
                raise _refused(
                    "artifact_url",
                    "is required with --state-url: where outputs are kept, a folder that every server reaches or "
                    "s3://BUCKET/PREFIX",
                )
        if self.artifact_url is not None and not self.on:
            raise _refused("artifact_url", "needs --state-dir or --state-url, which keep the jobs of the outputs")

    @property
    def on(self) -> bool:
        """Whether jobs outlive the process."""
        return self.state_dir is not None or self.state_url is not None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobsConfig:
    """How long finished jobs and their results are kept, and how much of them. None: see `KeepingLimits.of`."""

    retention: float | None = setting(
        None,
        "seconds for which a finished job, its events and its artifacts are kept (default: 600; 7 days with "
        "--state-dir or --state-url)",
        minimum=0,
    )
    max_retention: float | None = setting(
        None,
        "longest retention in seconds that a request may ask for (default: a day; 30 days with --state-dir or "
        "--state-url)",
        minimum=0,
    )
    artifact_budget: int | None = setting(
        None,
        "bytes of artifacts that are kept; above that the oldest finished job is deleted (default: 1 GiB of memory; "
        "100 GiB of --state-dir or --artifact-url)",
        minimum=1,
    )
    asset_budget: int | None = setting(
        None,
        "bytes of uploaded media that are kept; uploads that do not fit are refused with RESOURCE_EXHAUSTED (default: "
        "1 GiB of memory; 10 GiB of --state-dir or --artifact-url)",
        minimum=1,
    )
    asset_retention: float = setting(3600.0, "seconds for which uploaded media is kept after its last use", minimum=0)
    queue_timeout: float | None = setting(
        None, "seconds that a job may wait in the queue, unless its request sets another value", minimum=0
    )
    run_timeout: float | None = setting(
        None, "seconds that a job may run after its start, unless its request sets another value", minimum=0
    )
    disconnect_grace: float = setting(
        30.0, "seconds that a disconnected client has to come back before its job is cancelled", minimum=0
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KeepingLimits:
    """For how long finished jobs are kept, in seconds, and how many bytes."""

    retention: float
    max_retention: float
    artifact_budget: int
    asset_budget: int

    @classmethod
    def of(cls, jobs: JobsConfig, store: StoreConfig) -> KeepingLimits:
        """What is set; the rest by where it is kept, since a disk holds more than memory does."""
        defaults = (
            {"retention": 7 * DAY, "max_retention": 30 * DAY, "artifact_budget": 100 * GIB, "asset_budget": 10 * GIB}
            if store.on
            else {"retention": 10 * MINUTE, "max_retention": DAY, "artifact_budget": GIB, "asset_budget": GIB}
        )
        found = {name: default if (set_ := getattr(jobs, name)) is None else set_ for name, default in defaults.items()}
        if jobs.max_retention is None:
            found["max_retention"] = max(found["max_retention"], found["retention"])
        elif found["retention"] > found["max_retention"]:
            if jobs.retention is not None:
                raise _refused(
                    "max_retention", f"{jobs.max_retention:g} s is below --retention, which is {jobs.retention:g} s"
                )
            found["retention"] = found["max_retention"]
        return cls(**found)  # type: ignore[arg-type]


def _refused(name: str, why: str) -> ConfigError:
    return ConfigError(f"{name}: {why}", violations=(Violation(name, why),))
