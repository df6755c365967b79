"""The rules for how a job is run and told of; those for what it generates are in `omni_grpc.resolve`."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Iterator

from omni_grpc.engine import Submission
from omni_grpc.gate.ask import Ask, Delivery, JobOptions
from omni_grpc.gate.refusals import Refusals
from omni_grpc.store.records import Webhook
from omni_grpc.types.caller import Caller
from omni_grpc.types.request import RestartPolicy
from omni_grpc.types.results import RequestWarning
from omni_grpc.webhooks import AskedWebhook, Webhooks

MAX_ID_CHARS = 128
MAX_LABELS = 64
MAX_PRIORITY = 100


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """A job to create, and how its caller wants to be told about it: `interval` is the shortest time in seconds between
    progress events.
    """

    submission: Submission
    delivery: Delivery
    interval: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OptionRules:
    """What a server allows. `max_retention` in seconds; `durable`: jobs outlive it; `signs`: outputs have addresses;
    `clock`: the time by which deadlines go.
    """

    max_retention: float
    durable: bool
    signs: bool
    webhooks: Webhooks
    clock: Callable[[], float]


def read(ask: Ask, caller: Caller, rules: OptionRules) -> Asked:
    """What a caller asks for, with placeholders for its inputs.

    Raises InvalidArgument with every field that is wrong, those that its stack found included.
    """
    refusals = Refusals(ask.violations)
    options = ask.options
    cancels = ask.streaming if options.cancels is None else options.cancels
    delivery = options.delivery or (Delivery.INLINE_CHUNKS if ask.streaming else Delivery.REFERENCE)
    if options.disconnect_grace is not None and not cancels:
        refusals.refuse("options.disconnect_grace", "has no effect unless on_disconnect is DISCONNECT_POLICY_CANCEL")
    if not ask.streaming:
        _refuse_stream_options(refusals, options)
    else:
        check_delivery(refusals, "options.delivery", delivery, rules)
    _check_labels(refusals, options)
    submission = Submission(
        draft=dataclasses.replace(ask.draft, inputs=ask.expected),
        tenant=caller.tenant,
        subject=caller.subject,
        labels=options.labels,
        request_id=refusals.text("options.request_id", options.request_id, MAX_ID_CHARS),
        fingerprint=ask.fingerprint,
        client_job_id=refusals.text("options.client_job_id", options.client_job_id, MAX_ID_CHARS),
        priority=refusals.number("options.priority", options.priority, -MAX_PRIORITY, MAX_PRIORITY),
        queue_timeout=options.queue_timeout,
        run_timeout=options.run_timeout,
        deadline=_deadline(refusals, options.deadline, rules.clock()),
        retention=_retention(refusals, options.retention, rules.max_retention),
        cancel_on_disconnect=cancels,
        disconnect_grace=options.disconnect_grace,
        requeue=options.restart is RestartPolicy.REQUEUE,
        webhook=_webhook(refusals, options.webhook, caller, rules.webhooks),
        trace=caller.trace,
        warnings=tuple(_warnings(options, rules)),
    )
    refusals.check()
    return Asked(submission, delivery, options.interval or 0.0)


def check_delivery(refusals: Refusals, field: str, delivery: Delivery, rules: OptionRules) -> None:
    """Refuses signed addresses where there are none."""
    if delivery is Delivery.SIGNED_URL and not rules.signs:
        refusals.refuse(
            field,
            "ARTIFACT_DELIVERY_SIGNED_URL needs --http-port, or a store that has addresses (--artifact-url s3://...); "
            "use ARTIFACT_DELIVERY_REFERENCE, and DownloadArtifact",
        )


def _webhook(refusals: Refusals, asked: AskedWebhook | None, caller: Caller, webhooks: Webhooks) -> Webhook | None:
    if asked is None:
        return None
    wrong = webhooks.check(asked, caller.tenant)
    for violation in wrong:
        refusals.refuse(violation.field, violation.description)
    return None if wrong else webhooks.accepted(asked)


def _warnings(options: JobOptions, rules: OptionRules) -> Iterator[RequestWarning]:
    if options.restart is RestartPolicy.REQUEUE and not rules.durable:
        yield RequestWarning(
            code="RESTART_POLICY_WITHOUT_EFFECT",
            field="options.on_server_restart",
            message="this server keeps jobs in memory: they are lost with it (--state-dir keeps them)",
            requested=RestartPolicy.REQUEUE,
        )


def _check_labels(refusals: Refusals, options: JobOptions) -> None:
    if len(options.labels) > MAX_LABELS:
        refusals.refuse("options.labels", f"has {len(options.labels)} entries; the maximum is {MAX_LABELS}")
    for text in (text for pair in options.labels.items() for text in pair):
        refusals.text("options.labels", text, MAX_ID_CHARS)


def _deadline(refusals: Refusals, deadline: float | None, now: float) -> float | None:
    if deadline is not None and deadline <= now:
        refusals.refuse("options.deadline", f"{_date(deadline)} is in the past")
    return deadline


def _date(seconds: float) -> str:
    if seconds < 0:
        return f"{seconds:.3f} s in Unix time"
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat().replace("+00:00", "Z")


def _retention(refusals: Refusals, seconds: float | None, most: float) -> float | None:
    if seconds is not None and seconds > most:
        refusals.refuse("options.retention", f"{seconds:g} s is too long; nearest valid value: {most:g} s")
    return seconds


def _refuse_stream_options(refusals: Refusals, options: JobOptions) -> None:
    """Refuses options that shape a stream: CreateJob has none, so they would have no effect."""
    if options.delivery not in (None, Delivery.REFERENCE):
        refusals.refuse("options.delivery", "CreateJob does not stream; set `delivery` on WatchJob, or use Generate*")
    if options.interval is not None:
        refusals.refuse("options.min_progress_interval", "CreateJob does not stream events; set it on WatchJob")
    if options.disconnect_grace == 0:
        refusals.refuse("options.disconnect_grace", "0 would cancel the job of CreateJob before anyone can watch it")
