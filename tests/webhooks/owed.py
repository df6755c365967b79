"""Jobs with webhooks, and what is owed for them."""

from __future__ import annotations

from omni_grpc.store.records import Delivery, JobRecord, JobSpec, JobState, JobWrite, Webhook
from omni_grpc.types.media import ImageFormat
from omni_grpc.types.request import Guidance, Request, Task


def record(
    job_id: str = "job_1",
    *,
    webhook: Webhook | None = None,
    state: JobState = JobState.SUCCEEDED,
    tenant: str = "studio",
    server: str = "server-1",
) -> JobRecord:
    request = Request(
        id=job_id, model="toy", prompt="a", task=Task.TEXT_TO_IMAGE, negative_prompt=None, width=64, height=64, steps=1,
        guidance=Guidance(), seeds=(1,), num_outputs=1, output_format=ImageFormat.PNG,
    )  # fmt: skip
    spec = JobSpec(request=request, webhook=webhook)
    return JobRecord(
        id=job_id, spec=spec, model="toy", task="TEXT_TO_IMAGE", state=state, create_time=1.0, tenant=tenant,
        server=server,
    )  # fmt: skip


def delivery(job_id: str = "job_1", state: JobState = JobState.SUCCEEDED, **changes: object) -> Delivery:
    fields = {
        "id": f"{job_id}-{state.lower()}", "job_id": job_id, "tenant": "studio", "state": state,
        "url": "https://hooks.test/a", "host": "hooks.test", "secret_name": "studio", "body": b'{"a": 1}\xff',
        "create_time": 5.0, "due": 5.0,
    }  # fmt: skip
    return Delivery(**fields | changes)


def write(*owed: Delivery, created: bool = True, **changes: object) -> JobWrite:
    """A write of the job that these are owed for."""
    return JobWrite(record=record(owed[0].job_id, **changes), deliveries=owed, created=created)
