"""Every rpc, by every kind of caller: without a token, without the scope, of another tenant, and the owner."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pytest
import pytest_asyncio
import yaml
from google.protobuf.message import Message
from grpc import aio

from omni_grpc.server.server import SERVICES, served_methods
from omni_grpc.v1 import admin_pb2, artifact_pb2, generation_pb2, job_pb2, model_pb2

from .service import Service, image, read_refusal, serving

pytestmark = pytest.mark.service

CALLERS: Mapping[str, tuple[str, list[str]]] = {
    "owner": ("studio", ["generate", "read"]),
    "reader": ("studio", ["read"]),
    "maker": ("studio", ["generate"]),
    "stranger": ("other", ["generate", "read"]),
    "admin": ("house", ["admin"]),
}
ALL, MAKE, LOOK = {"generate", "read", "admin"}, {"generate"}, {"read", "admin"}
MANAGE = MAKE | {"admin"}
OPERATE = {"admin"}


@dataclasses.dataclass
class Things:
    """What the tenant `studio` has."""

    job: str
    artifact: str
    asset: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rpc:
    """An rpc: its request, the scopes of which one is needed, and what a stranger sees of another tenant's things."""

    make: Callable[[Things], Any]
    scopes: set[str]
    stranger: str = "OK"
    admin: str = "OK"
    """What an admin gets."""
    seen: Callable[[Any], int] | None = None
    """How many of the tenant's things are in the answer."""


def upload(things: Things) -> Any:
    header = artifact_pb2.UploadHeader(mime_type="image/png", size_bytes=3)
    return [artifact_pb2.UploadAssetRequest(header=header), artifact_pb2.UploadAssetRequest(data=b"abc")]


def edit(things: Things) -> generation_pb2.EditImageRequest:
    return generation_pb2.EditImageRequest(model="toy", prompt="x", images=[{"asset_id": things.asset}])


RPCS: Mapping[str, Rpc] = {
    "GenerationService/GenerateImage": Rpc(make=lambda it: image(), scopes=MAKE),
    "GenerationService/EditImage": Rpc(make=edit, scopes=MAKE),
    "GenerationService/GenerateVideo": Rpc(
        make=lambda it: generation_pb2.GenerateVideoRequest(model="toy", prompt="x"), scopes=MAKE
    ),
    "GenerationService/GenerateAudio": Rpc(
        make=lambda it: generation_pb2.GenerateAudioRequest(model="toy", prompt="x"), scopes=MAKE
    ),
    "JobService/CreateJob": Rpc(make=lambda it: job_pb2.CreateJobRequest(generate_image=image()), scopes=MAKE),
    "JobService/GetJob": Rpc(
        make=lambda it: job_pb2.GetJobRequest(job_id=it.job), scopes=ALL, stranger="JOB_NOT_FOUND"
    ),
    "JobService/ListJobs": Rpc(
        make=lambda it: job_pb2.ListJobsRequest(), scopes=LOOK, seen=lambda answer: len(answer.jobs)
    ),
    "JobService/WatchJob": Rpc(
        make=lambda it: job_pb2.WatchJobRequest(job_id=it.job), scopes=ALL, stranger="JOB_NOT_FOUND"
    ),
    "JobService/WatchJobs": Rpc(
        make=lambda it: job_pb2.WatchJobsRequest(job_ids=[it.job]), scopes=LOOK, stranger="JOB_NOT_FOUND"
    ),
    "JobService/CancelJob": Rpc(
        make=lambda it: job_pb2.CancelJobRequest(job_id=it.job), scopes=MANAGE, stranger="JOB_NOT_FOUND"
    ),
    "JobService/DeleteJob": Rpc(
        make=lambda it: job_pb2.DeleteJobRequest(job_id=it.job), scopes=MANAGE, stranger="JOB_NOT_FOUND"
    ),
    "ArtifactService/DownloadArtifact": Rpc(
        make=lambda it: artifact_pb2.DownloadArtifactRequest(artifact_id=it.artifact),
        scopes=ALL,
        stranger="ARTIFACT_NOT_FOUND",
    ),
    "ArtifactService/ListArtifacts": Rpc(
        make=lambda it: artifact_pb2.ListArtifactsRequest(), scopes=LOOK, seen=lambda answer: len(answer.artifacts)
    ),
    "ArtifactService/DeleteArtifact": Rpc(
        make=lambda it: artifact_pb2.DeleteArtifactRequest(artifact_id=it.artifact),
        scopes=MANAGE,
        stranger="ARTIFACT_NOT_FOUND",
    ),
    "ArtifactService/UploadAsset": Rpc(make=upload, scopes=MAKE),
    "ModelService/ListModels": Rpc(make=lambda it: model_pb2.ListModelsRequest(), scopes=ALL),
    "ModelService/GetModel": Rpc(make=lambda it: model_pb2.GetModelRequest(model="toy"), scopes=ALL),
    "ModelService/ListLoras": Rpc(make=lambda it: model_pb2.ListLorasRequest(), scopes=ALL),
    "AdminService/LoadModel": Rpc(make=lambda it: admin_pb2.LoadModelRequest(model="toy"), scopes=ALL),
    "AdminService/UnloadModel": Rpc(
        make=lambda it: admin_pb2.UnloadModelRequest(model="toy"), scopes=OPERATE, stranger="SCOPE_MISSING"
    ),
    "AdminService/Sleep": Rpc(
        make=lambda it: admin_pb2.SleepRequest(model="toy"), scopes=OPERATE, stranger="SCOPE_MISSING"
    ),
    "AdminService/Wake": Rpc(
        make=lambda it: admin_pb2.WakeRequest(model="toy"), scopes=OPERATE, stranger="SCOPE_MISSING"
    ),
    "AdminService/Drain": Rpc(
        make=lambda it: admin_pb2.DrainRequest(model="toy", replica=0), scopes=OPERATE, stranger="SCOPE_MISSING"
    ),
    "AdminService/LoadLora": Rpc(
        make=lambda it: admin_pb2.LoadLoraRequest(lora_id="style", model="toy", path="/style.safetensors"),
        scopes=OPERATE,
        stranger="SCOPE_MISSING",
        admin="PATH_NOT_ALLOWED",
    ),
    "AdminService/UnloadLora": Rpc(
        make=lambda it: admin_pb2.UnloadLoraRequest(lora_id="style", model="toy"),
        scopes=OPERATE,
        stranger="SCOPE_MISSING",
        admin="LORA_NOT_FOUND",
    ),
    "AdminService/StartProfile": Rpc(
        make=lambda it: admin_pb2.StartProfileRequest(model="toy"), scopes=OPERATE, stranger="SCOPE_MISSING"
    ),
    "AdminService/StopProfile": Rpc(
        make=lambda it: admin_pb2.StopProfileRequest(profile_id="prf_0"),
        scopes=OPERATE,
        stranger="SCOPE_MISSING",
        admin="PROFILE_NOT_FOUND",
    ),
    "AdminService/GetServerInfo": Rpc(make=lambda it: admin_pb2.GetServerInfoRequest(), scopes=ALL),
    "AdminService/GetServerStats": Rpc(
        make=lambda it: admin_pb2.GetServerStatsRequest(),
        scopes=LOOK,
        seen=lambda answer: answer.stats.artifact_bytes,
    ),
    "AdminService/WatchServerStats": Rpc(
        make=lambda it: admin_pb2.WatchServerStatsRequest(),
        scopes=LOOK,
        seen=lambda answer: answer.stats.artifact_bytes,
    ),
}
LACKED = {"EditImage", "GenerateVideo", "GenerateAudio"}
"""What the toy model does not do: it is refused after the scope is checked."""


@pytest_asyncio.fixture
async def service(tmp_path: Any) -> AsyncIterator[Service]:
    records = [
        {"name": name, "tenant": tenant, "scopes": scopes, "sha256": hashlib.sha256(token(name).encode()).hexdigest()}
        for name, (tenant, scopes) in CALLERS.items()
    ]
    file = tmp_path / "callers.yaml"
    file.write_text(yaml.safe_dump(records))
    file.chmod(0o600)
    async with serving(token_file=str(file)) as running:
        yield running


def token(name: str) -> str:
    return "omni_" + hashlib.sha256(name.encode()).hexdigest()[:43]


async def call(service: Service, name: str, request: Any, caller: str | None) -> Any:
    """The answer of an rpc, or its last message. Raises AioRpcError."""
    stubs = {
        "GenerationService": service.generation,
        "JobService": service.jobs,
        "ArtifactService": service.artifacts,
        "ModelService": service.models,
        "AdminService": service.admin,
    }
    group, _, method = name.partition("/")
    metadata = () if caller is None else (("authorization", f"Bearer {token(caller)}"),)
    if isinstance(request, list):
        return await getattr(stubs[group], method)(iter(request), metadata=metadata)
    started = getattr(stubs[group], method)(request, metadata=metadata)
    if not isinstance(started, aio.UnaryStreamCall):
        return await started
    last: Message | None = None
    async for message in started:
        last = message
        if method == "WatchServerStats":
            started.cancel()
            return last
    return last


async def outcome(service: Service, name: str, request: Any, caller: str | None) -> tuple[str, Any]:
    """OK or the reason of the refusal, and the answer."""
    try:
        return "OK", await call(service, name, request, caller)
    except aio.AioRpcError as error:
        return read_refusal(error).reason, None


async def things_of(service: Service) -> Things:
    """A finished job of `owner`, its output, and an upload."""
    await call(service, "GenerationService/GenerateImage", image(), "owner")
    jobs = await call(service, "JobService/ListJobs", job_pb2.ListJobsRequest(), "owner")
    asset = await call(service, "ArtifactService/UploadAsset", upload(Things("", "", "")), "owner")
    job = jobs.jobs[0]
    return Things(job.job_id, job.artifacts[0].artifact_id, asset.asset_id)


def test_the_table_has_every_rpc_that_is_served() -> None:
    served = {method.removeprefix("/omni_grpc.v1.") for method in served_methods()}
    assert served == RPCS.keys()
    assert len(SERVICES) == len({name.partition("/")[0] for name in RPCS})


@pytest.mark.parametrize("name", RPCS)
async def test_who_may_call_it_and_what_they_see(service: Service, name: str) -> None:
    rpc, done = RPCS[name], "TASK_NOT_SUPPORTED" if name.partition("/")[2] in LACKED else "OK"
    things = await things_of(service)
    request = rpc.make(things)
    assert (await outcome(service, name, request, None))[0] == "TOKEN_MISSING"
    assert (await outcome(service, name, request, "somebody"))[0] == "TOKEN_INVALID"
    for caller in ("reader", "maker"):
        if rpc.scopes.isdisjoint(CALLERS[caller][1]):
            assert (await outcome(service, name, request, caller))[0] == "SCOPE_MISSING", caller
    strangers = rpc.stranger if done == "OK" else done
    code, answer = await outcome(service, name, request, "stranger")
    assert code == strangers
    if rpc.seen is not None:
        assert rpc.seen(answer) == 0
    # those who delete come last
    done = "SCOPE_MISSING" if rpc.scopes == OPERATE else done
    code, answer = await outcome(service, name, request, "owner")
    assert code == done
    if rpc.seen is not None:
        assert rpc.seen(answer) > 0


@pytest.mark.parametrize("name", [name for name, rpc in RPCS.items() if "admin" in rpc.scopes])
async def test_an_admin_sees_and_stops_what_every_tenant_has(service: Service, name: str) -> None:
    things = await things_of(service)
    code, answer = await outcome(service, name, RPCS[name].make(things), "admin")
    assert code == RPCS[name].admin
    seen = RPCS[name].seen
    assert seen is None or seen(answer) > 0


async def test_another_tenants_asset_is_no_input(service: Service) -> None:
    things = await things_of(service)
    deleting = "ArtifactService/DeleteArtifact"
    assert (await outcome(service, deleting, _delete(things.asset), "stranger"))[0] == "ARTIFACT_NOT_FOUND"
    assert (await outcome(service, deleting, _delete(things.asset), "owner"))[0] == "OK"


ASKING = {
    "JobService/GetJob": lambda it: job_pb2.GetJobRequest(job_id=it.job),
    "JobService/WatchJobs": lambda it: job_pb2.WatchJobsRequest(job_ids=[it.job]),
    "ArtifactService/DownloadArtifact": lambda it: artifact_pb2.DownloadArtifactRequest(artifact_id=it.artifact),
    "ArtifactService/DeleteArtifact": lambda it: _delete(it.asset),
}


async def cause(service: Service, name: str, request: Any, caller: str) -> str:
    with pytest.raises(aio.AioRpcError) as caught:
        await call(service, name, request, caller)
    refusal = read_refusal(caught.value)
    assert refusal.reason.endswith("_NOT_FOUND")
    return refusal.metadata["cause"]


async def test_what_became_of_a_tenants_things_is_told_to_it_and_to_admins_alone(service: Service) -> None:
    things = await things_of(service)
    told = {}
    for name, of in ASKING.items():
        told[name, "there"] = await cause(service, name, of(things), "stranger")
    await call(service, "JobService/DeleteJob", job_pb2.DeleteJobRequest(job_id=things.job), "owner")
    await call(service, "ArtifactService/DeleteArtifact", _delete(things.asset), "owner")
    for name, of in ASKING.items():
        told[name, "gone"] = await cause(service, name, of(things), "stranger")
        assert await cause(service, name, of(things), "admin") == "DELETED", name
        assert await cause(service, name, of(things), "owner") == "DELETED", name
    assert set(told.values()) == {"UNKNOWN"}, told


def _delete(name: str) -> artifact_pb2.DeleteArtifactRequest:
    return artifact_pb2.DeleteArtifactRequest(artifact_id=name)


async def test_a_request_id_is_the_tenants_own(service: Service) -> None:
    made = job_pb2.CreateJobRequest(generate_image=image(options={"request_id": "r"}))
    mine = await call(service, "JobService/CreateJob", made, "owner")
    again = await call(service, "JobService/CreateJob", made, "owner")
    theirs = await call(service, "JobService/CreateJob", made, "stranger")
    assert (again.job.job_id, again.deduplicated) == (mine.job.job_id, True)
    assert (theirs.job.job_id == mine.job.job_id, theirs.deduplicated) == (False, False)


async def test_a_watch_by_label_shows_the_tenants_own_jobs_alone(service: Service) -> None:
    labeled = job_pb2.CreateJobRequest(generate_image=image(options={"labels": {"k": "v"}}))
    await call(service, "JobService/CreateJob", labeled, "stranger")
    mine = await call(service, "JobService/CreateJob", labeled, "owner")
    metadata = (("authorization", f"Bearer {token('owner')}"),)
    seen = set()
    watch = service.jobs.WatchJobs(job_pb2.WatchJobsRequest(label_selector={"k": "v"}), metadata=metadata)
    async for update in watch:
        seen.add(update.snapshot.job_id or update.event.job_id)
        if update.event.WhichOneof("event") == "completed" or update.snapshot.HasField("end_time"):
            break
    watch.cancel()
    assert seen == {mine.job.job_id}


async def test_two_tokens_are_none(service: Service) -> None:
    metadata = tuple(("authorization", f"Bearer {token(name)}") for name in ("owner", "admin"))
    with pytest.raises(aio.AioRpcError) as caught:
        await service.jobs.ListJobs(job_pb2.ListJobsRequest(), metadata=metadata)
    assert read_refusal(caught.value).reason == "TOKEN_INVALID"


async def test_health_and_reflection_need_no_token(service: Service) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    stub = health_pb2_grpc.HealthStub(service.channel)
    assert (await stub.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING


async def test_an_admin_address_alone_serves_the_admin_service() -> None:
    async with serving(admin_address="127.0.0.1:0") as service:
        with pytest.raises(aio.AioRpcError) as caught:
            await service.admin.GetServerInfo(admin_pb2.GetServerInfoRequest())
        assert read_refusal(caught.value).reason == "METHOD_ELSEWHERE"
        assert service.server.admin_address != service.server.address
        direct = (("grpc.enable_http_proxy", 0),)
        async with aio.insecure_channel(service.server.admin_address, options=direct) as channel:
            info = channel.unary_unary(
                "/omni_grpc.v1.AdminService/GetServerInfo",
                request_serializer=admin_pb2.GetServerInfoRequest.SerializeToString,
                response_deserializer=admin_pb2.GetServerInfoResponse.FromString,
            )
            assert (await info(admin_pb2.GetServerInfoRequest())).version
            models = channel.unary_unary("/omni_grpc.v1.ModelService/ListModels")
            with pytest.raises(aio.AioRpcError):
                await models(b"")
