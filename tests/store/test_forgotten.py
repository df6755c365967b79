"""Expired, deleted, or never here: what an error says of a name that leads nowhere."""

import pytest

from omni_grpc.config import EngineConfig
from omni_grpc.engine import JobState
from omni_grpc.gate.stored import Stored
from omni_grpc.store.forgotten import Forgotten
from omni_grpc.store.records import Cause
from omni_grpc.store.storage import Storage
from omni_grpc.types.caller import Caller, Scope
from omni_grpc.types.errors import NotFound
from tests.engine.manual import ask, run_through, started_engine
from tests.store.test_assets import put


async def cause_of(call, *arguments):
    with pytest.raises(NotFound) as caught:
        await call(*arguments)
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
    artifacts = [job.artifacts[0].artifact_id for job in (expired, deleted)]
    await engine.storage.retention.forget([expired])
    await engine.storage.delete(deleted)
    asset = await put(engine.assets, b"abc", "image/png")
    await engine.assets.delete(asset.id)
    for find, kind, names in (
        (engine.jobs.find, "JOB", (expired.id, deleted.id)),
        (engine.artifacts.find, "ARTIFACT", artifacts),
    ):
        assert await cause_of(find, names[0]) == (f"{kind}_NOT_FOUND", "EXPIRED", instance)
        assert await cause_of(find, names[1]) == (f"{kind}_NOT_FOUND", "DELETED", instance)
        assert await cause_of(find, "never") == (f"{kind}_NOT_FOUND", "UNKNOWN", instance)
    assert await cause_of(engine.assets.use, asset.id) == ("ASSET_NOT_FOUND", "DELETED", instance)


@pytest.mark.parametrize("cause", [Cause.EXPIRED, Cause.DELETED])
async def test_a_tenant_learns_nothing_of_what_others_had(cause):
    engine, worker = await started_engine()
    job = ask(engine, tenant="a")
    run_through(worker, job)
    artifact = job.artifacts[0].artifact_id
    asset = (await put(engine.assets, b"abc", "image/png", tenant="a")).id

    def as_input(name, tenant=None):
        caller = Caller() if tenant is None else Caller(tenant=tenant, scopes=frozenset({Scope.GENERATE}))
        return Stored(engine).medium(caller, "images[0].asset_id", name)

    found = (
        (engine.jobs.find, job.id),
        (engine.artifacts.find, artifact),
        (engine.assets.use, asset),
        (as_input, artifact),
        (as_input, asset),
    )

    async def asked(tenant):
        """What it hears of each, once its name is left out, and what of one that never was."""
        heard = []
        for find, name in found:
            errors = []
            for asked_for in (name, "never"):
                with pytest.raises(NotFound) as caught:
                    await find(asked_for, tenant)
                failure = caught.value.failure
                errors.append((failure.message.replace(asked_for, ""), failure.metadata | {"name": ""}))
            heard.append(errors)
        return heard

    for find, name in found:
        for tenant in ("a", None):
            assert await find(name, tenant)
    kept = (await engine.assets.use(asset)).expire_time
    assert all(there == never for there, never in await asked("b"))
    assert (await engine.assets._files.asset(asset)).expire_time == kept, (
        "nor does it keep the upload of another for longer"
    )
    await engine.storage.retention.forget([job], cause)
    await engine.assets._drop(await engine.assets._files.asset(asset), cause)
    assert all(gone == never for gone, never in await asked("b"))
    for tenant in ("a", None):
        assert [gone[1]["cause"] for gone, _ in await asked(tenant)] == [cause] * len(found)


def test_two_processes_have_two_instances_and_each_knows_its_own_names_alone():
    first, second = Forgotten("one"), Forgotten("two")
    first.add("job_1", Cause.EXPIRED, tenant="")
    assert first.instance_id != second.instance_id
    assert "has expired" in str(first.not_found("job_1", reason="JOB_NOT_FOUND", tenant=""))
    error = second.not_found("job_1", reason="JOB_NOT_FOUND", tenant="")
    assert f"instance {second.instance_id}" in str(error)
    assert error.failure.metadata["cause"] == "UNKNOWN"


def test_the_newest_names_are_remembered_and_no_more():
    forgotten = Forgotten("here", capacity=3)
    for i in range(100):
        forgotten.add(f"job_{i}", Cause.EXPIRED, tenant="")
    assert len(forgotten) == 3
    errors = [forgotten.not_found(f"job_{i}", reason="JOB_NOT_FOUND", tenant=None) for i in (96, 97, 99)]
    causes = [error.failure.metadata["cause"] for error in errors]
    assert causes == ["UNKNOWN", "EXPIRED", "EXPIRED"]


def test_a_store_that_lasts_is_not_asked_about_a_restart():
    error = Forgotten("here", durable=True).not_found("job_1", reason="JOB_NOT_FOUND", tenant=None)
    assert "remembered by this server's store (instance here)" in str(error)
    assert "restart" not in str(error)
    assert Storage(EngineConfig.from_settings(model="toy")).forgotten._where.endswith("one before a restart?")
