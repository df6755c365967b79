"""What a tenant may not have, and when it may. One owner of these figures, so that replicas can share it later."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

from omni_grpc.engine import Submission
from omni_grpc.fleet import Fleet
from omni_grpc.gate.tenants import TenantLimits, Tenants, read_tenants
from omni_grpc.identity.files import Reloaded
from omni_grpc.resolve.work import pixel_steps
from omni_grpc.types.caller import Caller
from omni_grpc.types.errors import InvalidArgument, PermissionDenied, ResourceExhausted, Violation
from omni_grpc.types.request import Request

MINUTE = 60.0
MOST_BUCKETS = 4096
"""Buckets after which those of tenants that were idle for a minute are forgotten."""
LEAST_WAIT = 0.05
"""Seconds of the shortest RetryInfo, so that a client that obeys does not spin."""


@dataclasses.dataclass(slots=True)
class Bucket:
    """A budget that fills evenly, up to what comes in a minute (token bucket). `left` was so at `at`, in seconds."""

    left: float
    at: float

    def fill(self, per_minute: float, now: float) -> None:
        self.left = min(per_minute, self.left + (now - self.at) * per_minute / MINUTE)
        self.at = now


class Quotas:
    """Limits by tenant, from a file that is read again when it changes; without one, nobody has any."""

    def __init__(self, fleet: Fleet, path: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises ConfigError for a file that cannot be used."""
        self._fleet = fleet
        self._clock = clock
        self._file = None if path is None else Reloaded(Path(path), read_tenants)
        self._tenants = Tenants()
        self._buckets: dict[tuple[str, str], Bucket] = {}

    async def refresh(self) -> None:
        """Takes over what the file says now."""
        if self._file is not None and (found := await self._file.current()) is not self._tenants:
            self._tenants = found
            self._fleet.share_by(lambda tenant: found.of(tenant).share)

    def of(self, tenant: str) -> TenantLimits:
        return self._tenants.of(tenant)

    def sees(self, caller: Caller, model: str) -> bool:
        """Whether a model exists for the caller."""
        allowed = self.of(caller.tenant).models
        return caller.admin or allowed is None or model in allowed

    def require_model(self, caller: Caller, model: str) -> None:
        """Raises PermissionDenied (MODEL_NOT_ALLOWED) for a model that the caller does not see."""
        if not self.sees(caller, model):
            _allow("model", (model,), self.of(caller.tenant).models, reason="MODEL_NOT_ALLOWED")

    def check(self, submission: Submission) -> None:
        """Every refusal that needs nothing of what is in the media. Raises PermissionDenied for a model or a LoRA
        adapter, InvalidArgument for what no job of this tenant may ask, ResourceExhausted with the time after which to
        ask again.
        """
        limits, draft = self.of(submission.tenant), submission.draft
        model = self._fleet.model(draft.model).name
        _allow("model", (model,), limits.models, reason="MODEL_NOT_ALLOWED")
        loras = tuple(lora.lora_id for lora in draft.loras or ())
        _allow("sampling.loras", loras, limits.loras, reason="LORA_NOT_ALLOWED")
        if limits.max_priority is not None and submission.priority > limits.max_priority:
            raise _beyond("options.priority", submission.priority, limits.max_priority)
        self._check_held(submission.tenant, limits)
        self._check_rate(submission.tenant, "jobs_per_minute", limits.jobs_per_minute, 1.0)

    def check_work(self, tenant: str, request: Request) -> None:
        """The refusals that need the complete request, and again those of `check` that may have changed meanwhile."""
        limits = self.of(tenant)
        # a preset may have brought adapters that the request did not name
        _allow("sampling.loras", tuple(lora.lora_id for lora in request.loras), limits.loras, reason="LORA_NOT_ALLOWED")
        _check_size(request, limits)
        self._check_held(tenant, limits)
        self._check_rate(tenant, "jobs_per_minute", limits.jobs_per_minute, 1.0)
        self._check_rate(tenant, "pixel_steps_per_minute", limits.pixel_steps_per_minute, pixel_steps(request))

    def charge(self, tenant: str, request: Request) -> None:
        """A job of this request was accepted."""
        limits = self.of(tenant)
        for name, per_minute, amount in (
            ("jobs_per_minute", limits.jobs_per_minute, 1.0),
            ("pixel_steps_per_minute", limits.pixel_steps_per_minute, pixel_steps(request)),
        ):
            if per_minute is not None:
                self._bucket(tenant, name, per_minute).left -= amount

    def check_upload(self, tenant: str, size: int) -> None:
        """Raises ResourceExhausted where an upload of that many bytes is beyond what the tenant may keep."""
        self._check_stored(tenant, self.of(tenant), size)

    # --- parts ----------------------------------------------------------------------------------------------------

    def _check_held(self, tenant: str, limits: TenantLimits) -> None:
        stats = self._fleet.tenant_stats(tenant)
        if limits.max_queued is not None and stats.queued >= limits.max_queued:
            raise ResourceExhausted(
                f"tenant {tenant!r} has {stats.queued} jobs in the queue, and may have {limits.max_queued} "
                "(max_queued); retry later",
                reason="TENANT_QUEUE_FULL",
                retry_after=self._wait(tenant) if limits.max_queued else None,
            )
        if limits.input_bytes is not None and stats.input_bytes >= limits.input_bytes:
            raise ResourceExhausted(
                f"the jobs of tenant {tenant!r} wait with {stats.input_bytes} bytes of decoded inputs, and it may have "
                f"{limits.input_bytes} (input_bytes); retry later",
                reason="TENANT_INPUTS_FULL",
                retry_after=self._wait(tenant) if limits.input_bytes else None,
            )
        self._check_stored(tenant, limits, 0)

    def _check_stored(self, tenant: str, limits: TenantLimits, more: int) -> None:
        if limits.stored_bytes is None:
            return
        stats = self._fleet.tenant_stats(tenant)
        held = stats.artifact_bytes + stats.asset_bytes
        if held + more > limits.stored_bytes or (not more and held >= limits.stored_bytes):
            raise ResourceExhausted(
                f"tenant {tenant!r} keeps {held} bytes of outputs and uploads and may keep {limits.stored_bytes} "
                "(stored_bytes); delete some, or wait until they expire",
                reason="TENANT_STORAGE_FULL",
                retry_after=self._expiry(tenant, held + max(more, 1) - limits.stored_bytes),
            )

    def _check_rate(self, tenant: str, name: str, per_minute: float | None, amount: float) -> None:
        if per_minute is None:
            return
        if amount > per_minute:
            raise ResourceExhausted(
                f"this request alone is {amount:g}, and tenant {tenant!r} may have {per_minute:g} a minute ({name}): "
                "ask for less",
                reason="TENANT_RATE_TOO_LOW",
            )
        missing = amount - self._bucket(tenant, name, per_minute).left
        if missing > 0:
            wait = missing * MINUTE / per_minute
            raise ResourceExhausted(
                f"tenant {tenant!r} has had its {per_minute:g} a minute ({name}); retry in {wait:.2f} s",
                reason="TENANT_RATE",
                retry_after=max(LEAST_WAIT, wait + 1e-3),
                metadata={"limit": name},
            )

    def _bucket(self, tenant: str, name: str, per_minute: float) -> Bucket:
        now = self._clock()
        if len(self._buckets) >= MOST_BUCKETS:
            # one that nothing was asked of for a minute is full, as a new one is
            self._buckets = {key: kept for key, kept in self._buckets.items() if now - kept.at < MINUTE}
        bucket = self._buckets.setdefault((tenant, name), Bucket(per_minute, now))
        bucket.fill(per_minute, now)
        return bucket

    def _wait(self, tenant: str) -> float:
        return max(LEAST_WAIT, self._fleet.expected_wait(tenant))

    def _expiry(self, tenant: str, missing: int) -> float | None:
        """Seconds until so many bytes of a tenant expire; None where that is not known yet."""
        now = self._fleet.storage.clock()
        ends = [
            (job.record.expire_time - now, sum(artifact.size_bytes for artifact in job.artifacts))
            for job in self._fleet.jobs.newest(tenant=tenant)
            if job.record.expire_time is not None
        ]
        freed = 0
        for seconds, size in sorted(ends):
            freed += size
            if freed >= missing:
                return max(LEAST_WAIT, seconds + 0.1)
        return None


def _allow(field: str, asked: tuple[str, ...], allowed: tuple[str, ...] | None, *, reason: str) -> None:
    if allowed is not None and (refused := sorted(set(asked).difference(allowed))):
        message = f"{field}: {', '.join(refused)} is not for this tenant; it may use {', '.join(allowed) or 'none'}"
        raise PermissionDenied(message, reason=reason, violations=(Violation(field, message),))


def _check_size(request: Request, limits: TenantLimits) -> None:
    for field, value, most in (
        ("width, height", request.width * request.height, limits.max_pixels),
        ("sampling.steps", request.steps, limits.max_steps),
        ("num_frames", request.num_frames or 0, limits.max_frames),
    ):
        if most is not None and value > most:
            raise _beyond(field, value, most)


def _beyond(field: str, value: int, most: int) -> InvalidArgument:
    description = f"{value} is above this tenant's limit; nearest valid value: {most}"
    return InvalidArgument(
        f"{field}: {description}", reason="TENANT_LIMIT", violations=(Violation(field, description),)
    )
