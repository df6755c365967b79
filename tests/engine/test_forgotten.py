"""Expired, deleted, or never here: what an error says of a name that leads nowhere."""

import pytest

from omni_grpc.engine import JobState
from omni_grpc.engine.forgotten import Cause, Forgotten
from omni_grpc.types.errors import NotFound
from tests.engine.manual import ask, run_through, started_engine


def cause_of(call, *arguments):
    with pytest.raises(NotFound) as caught:
        call(*arguments)
    metadata = caught.value.failure.metadata
    assert metadata["name"] == arguments[0]
    return caught.value.reason, metadata["cause"], metadata["instance_id"]


async def test_jobs_outputs_and_uploads_say_what_became_of_them():
    engine, worker = await started_engine()
    instance = engine.forgotten.instance_id
    expired, deleted = ask(engine, retention=0), ask(engine)
    for job in (expired, deleted):
        run_through(worker, job)
        assert job.state is JobState.SUCCEEDED
    artifacts = [job.artifacts[0].id for job in (expired, deleted)]
    engine._retention.forget(expired)
    engine.delete(deleted.id)
    asset = engine.assets.put(b"abc", "image/png")
    engine.assets.delete(asset.id)
    for find, kind, names in (
        (engine.jobs.get, "JOB", (expired.id, deleted.id)),
        (engine.artifacts.get, "ARTIFACT", artifacts),
    ):
        assert cause_of(find, names[0]) == (f"{kind}_NOT_FOUND", "EXPIRED", instance)
        assert cause_of(find, names[1]) == (f"{kind}_NOT_FOUND", "DELETED", instance)
        assert cause_of(find, "never") == (f"{kind}_NOT_FOUND", "UNKNOWN", instance)
    assert cause_of(engine.assets.get, asset.id) == ("ASSET_NOT_FOUND", "DELETED", instance)


def test_two_processes_have_two_instances_and_each_knows_its_own_names_alone():
    first, second = Forgotten(), Forgotten()
    first.add("job_1", Cause.EXPIRED)
    assert first.instance_id != second.instance_id
    assert "has expired" in str(first.not_found("job_1", reason="JOB_NOT_FOUND"))
    error = second.not_found("job_1", reason="JOB_NOT_FOUND")
    assert f"instance {second.instance_id}" in str(error)
    assert error.failure.metadata["cause"] == "UNKNOWN"


def test_the_newest_names_are_remembered_and_no_more():
    forgotten = Forgotten(capacity=3)
    for i in range(100):
        forgotten.add(f"job_{i}", Cause.EXPIRED)
    assert len(forgotten) == 3
    causes = [forgotten.not_found(f"job_{i}", reason="JOB_NOT_FOUND").failure.metadata["cause"] for i in (96, 97, 99)]
    assert causes == ["UNKNOWN", "EXPIRED", "EXPIRED"]
