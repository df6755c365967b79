"""The audit log of a real server: every rpc by every kind of caller leaves the right line, and no secret is in it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
import signal
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from grpc import aio

from omni_grpc.cli import serve as command
from omni_grpc.client.channel import options_for
from omni_grpc.config import EngineConfig, options
from omni_grpc.engine import Engine, EngineState
from omni_grpc.engine.scheduler import Lane
from omni_grpc.fleet import Fleet
from omni_grpc.gate import Gate
from omni_grpc.gate.operation import PATHS
from omni_grpc.types.errors import Code, ConfigError, Failure
from omni_grpc.v1 import admin_pb2, artifact_pb2, job_pb2, model_pb2, options_pb2

from .fake_executor import FakeExecutor
from .service import CHECKPOINT, Service, image, serving, until
from .test_access import CALLERS, RPCS, call, outcome, things_of, token

pytestmark = pytest.mark.service

WRITES = {"CreateJob", "CancelJob", "DeleteJob", "DownloadArtifact", "DeleteArtifact", "UploadAsset"}
CODES = {
    "OK": "OK",
    "TOKEN_MISSING": "UNAUTHENTICATED",
    "TOKEN_INVALID": "UNAUTHENTICATED",
    "SCOPE_MISSING": "PERMISSION_DENIED",
    "JOB_NOT_FOUND": "NOT_FOUND",
    "ARTIFACT_NOT_FOUND": "NOT_FOUND",
    "PROFILE_NOT_FOUND": "NOT_FOUND",
    "TASK_NOT_SUPPORTED": "FAILED_PRECONDITION",
}


@contextlib.asynccontextmanager
async def audited(folder: Path, **settings: Any) -> AsyncIterator[Service]:
    records = [
        {"name": name, "tenant": tenant, "scopes": scopes, "sha256": hashlib.sha256(token(name).encode()).hexdigest()}
        for name, (tenant, scopes) in CALLERS.items()
    ]
    file = folder / "callers.yaml"
    file.write_text(yaml.safe_dump(records))
    file.chmod(0o600)
    async with serving(token_file=str(file), audit_log=str(folder / "audit.jsonl"), **settings) as running:
        yield running


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def action_of(rpc: str) -> str:
    group, _, method = rpc.partition("/")
    return "CreateJob" if group == "GenerationService" else method


@pytest.mark.parametrize("name", RPCS)
async def test_every_rpc_leaves_its_line(tmp_path: Path, name: str) -> None:
    expected = []
    async with audited(tmp_path) as service:
        things = await things_of(service)
        request = RPCS[name].make(things)
        # those who delete come last
        for caller in (None, "somebody", "reader", "maker", "stranger", "owner"):
            if caller in ("reader", "maker") and not RPCS[name].scopes.isdisjoint(CALLERS[caller][1]):
                continue
            reason, _ = await outcome(service, name, request, caller)
            if reason in ("TOKEN_MISSING", "TOKEN_INVALID"):
                expected.append(("Authenticate", None, None, CODES[reason], reason))
            elif reason != "OK" or action_of(name) in WRITES:
                known = reason if reason != "OK" else None
                expected.append((action_of(name), CALLERS[caller][0], caller, CODES[reason], known))
                if (name, reason) == ("GenerationService/GenerateImage", "OK"):
                    # which sends the bytes on its stream
                    expected.append(("DownloadArtifact", CALLERS[caller][0], caller, "OK", None))
    found = lines(tmp_path / "audit.jsonl")
    assert [line["action"] for line in (found[0], found[-1])] == ["LogOpened", "LogClosed"]
    told = [line for line in found[1:-1] if line["action"] != "JobEnded"]
    setup, told = told[:3], told[3:]
    assert [line["action"] for line in setup] == ["CreateJob", "DownloadArtifact", "UploadAsset"]
    names = ("action", "tenant", "subject", "outcome", "reason")
    assert [tuple(line[each] for each in names) for line in told] == expected
    assert all(line["peer"].startswith("ipv4:127.0.0.1:") for line in told)
    assert {line["call"] for line in told if line["action"] == "Authenticate"} == {name}
    # what the call is about is in its line
    for field in ("job_id", "artifact_id"):
        if isinstance(getattr(request, field, ""), str) and getattr(request, field, ""):
            assert {line[field] for line in told[2:]} == {getattr(request, field)}


async def test_a_line_has_names_and_sizes(tmp_path: Path) -> None:
    async with audited(tmp_path) as service:
        things = await things_of(service)
        await call(service, *_asking(things.artifact), "admin")
    found = {line["action"]: line for line in lines(tmp_path / "audit.jsonl")}
    made, ended, got = found["CreateJob"], found["JobEnded"], found["DownloadArtifact"]
    assert (made["job_id"], made["model"], made["task"]) == (things.job, "toy", "TEXT_TO_IMAGE")
    assert (made["width"], made["height"], made["total_steps"], made["num_outputs"]) == (32, 16, 3, 1)
    assert (ended["job_id"], ended["tenant"], ended["subject"], ended["outcome"]) == (
        things.job,
        "studio",
        "owner",
        "OK",
    )
    assert (ended["steps"], ended["outputs"], ended["peer"]) == (3, 1, None)
    assert got["size_bytes"] == ended["size_bytes"] > 0
    assert (got["artifact_id"], got["job_id"], got["tenant"]) == (things.artifact, things.job, "house")
    assert (found["UploadAsset"]["asset_id"], found["UploadAsset"]["size_bytes"]) == (things.asset, 3)
    assert made["time"].endswith("Z")
    assert len(made["time"]) == len("2026-01-01T00:00:00.000Z")


def _asking(artifact: str) -> tuple[str, Any]:
    return "ArtifactService/DownloadArtifact", artifact_pb2.DownloadArtifactRequest(artifact_id=artifact)


async def test_an_inline_output_is_a_download(tmp_path: Path) -> None:
    async with audited(tmp_path) as service:
        things = await things_of(service)
        watch = job_pb2.WatchJobRequest(job_id=things.job, delivery=options_pb2.ARTIFACT_DELIVERY_INLINE_CHUNKS)
        await call(service, "JobService/WatchJob", watch, "maker")
    got = [line for line in lines(tmp_path / "audit.jsonl") if line["action"] == "DownloadArtifact"]
    assert [(line["subject"], line["artifact_id"]) for line in got] == [
        ("owner", things.artifact),
        ("maker", things.artifact),
    ], "GenerateImage sends the bytes on its stream too"


async def test_how_a_job_ended_is_told(tmp_path: Path) -> None:
    async with audited(tmp_path, max_queue=1, max_num_seqs=1) as service:
        service.executor.failures[Lane.STEP] = Failure(
            code=Code.INTERNAL, reason="BROKEN", message="a PROMPT was in it"
        )
        failed = await outcome(service, "GenerationService/GenerateImage", image(), "owner")
        assert failed[0] == "BROKEN"
        service.executor.gates[Lane.STEP].close()
        made = job_pb2.CreateJobRequest(generate_image=image())
        running = await call(service, "JobService/CreateJob", made, "owner")
        await until(lambda: service.engine.stats().running == 1)
        await call(service, "JobService/CreateJob", made, "owner")
        assert (await outcome(service, "JobService/CreateJob", made, "owner"))[0] == "QUEUE_FULL"
        cancel = job_pb2.CancelJobRequest(job_id=running.job.job_id, reason="a REASON of mine")
        await call(service, "JobService/CancelJob", cancel, "admin")
    text = (tmp_path / "audit.jsonl").read_text()
    found = lines(tmp_path / "audit.jsonl")
    ended = [(line["outcome"], line["reason"]) for line in found if line["action"] == "JobEnded"]
    assert ended == [("INTERNAL", "BROKEN"), ("CANCELLED", "JOB_CANCELLED"), ("UNAVAILABLE", "SERVER_STOPPED")]
    refused = [line for line in found if line["reason" if "reason" in line else "action"] == "QUEUE_FULL"]
    assert [(line["action"], line["outcome"]) for line in refused] == [("CreateJob", "RESOURCE_EXHAUSTED")]
    assert "PROMPT" not in text
    assert "REASON" not in text


async def test_nothing_that_a_caller_wrote_is_in_it(tmp_path: Path) -> None:
    secret = "omni_" + "Z" * 43
    async with audited(tmp_path) as service:
        things = await things_of(service)
        options = {"labels": {secret: secret}, "request_id": secret, "client_job_id": secret}
        for caller in ("owner", "stranger", "reader", secret):
            for name, request in {
                "JobService/CreateJob": job_pb2.CreateJobRequest(
                    generate_image=image(prompt=secret, negative_prompt=secret, options=options)
                ),
                "GenerationService/GenerateImage": image(model=secret, prompt=secret),
                "JobService/GetJob": job_pb2.GetJobRequest(job_id=secret),
                "JobService/WatchJob": job_pb2.WatchJobRequest(job_id=secret),
                "JobService/ListJobs": job_pb2.ListJobsRequest(page_token=secret),
                "JobService/CancelJob": job_pb2.CancelJobRequest(job_id=secret, reason=secret),
                "JobService/DeleteJob": job_pb2.DeleteJobRequest(job_id=secret),
                "ArtifactService/DeleteArtifact": artifact_pb2.DeleteArtifactRequest(artifact_id=secret),
                "ArtifactService/ListArtifacts": artifact_pb2.ListArtifactsRequest(job_id=secret),
                "ModelService/GetModel": model_pb2.GetModelRequest(model=secret),
                "ModelService/ListLoras": model_pb2.ListLorasRequest(model=secret),
                "AdminService/LoadModel": admin_pb2.LoadModelRequest(model=secret),
                _asking(secret)[0]: _asking(secret)[1],
                "ArtifactService/UploadAsset": [
                    artifact_pb2.UploadAssetRequest(header={"mime_type": secret, "size_bytes": 2, "sha256": b"x" * 32}),
                    artifact_pb2.UploadAssetRequest(data=b"ab"),
                ],
            }.items():
                await outcome(service, name, request, caller)
        unknown = service.channel.unary_unary(f"/omni_grpc.v1.JobService/{secret}")
        with contextlib.suppress(Exception):
            await unknown(b"", metadata=(("authorization", f"Bearer {secret}"),))
    text = (tmp_path / "audit.jsonl").read_text()
    assert len(text.splitlines()) > 40, "all of these leave lines"
    for hidden in ("ZZZ", "Bearer", "a red circle", *(token(name)[5:] for name in CALLERS)):
        assert hidden not in text, hidden
    assert things.job in text


async def test_two_tokens_and_the_default_of_none(tmp_path: Path) -> None:
    async with audited(tmp_path) as service:
        metadata = tuple(("authorization", f"Bearer {token(name)}") for name in ("owner", "admin"))
        with contextlib.suppress(Exception):
            await service.jobs.ListJobs(job_pb2.ListJobsRequest(), metadata=metadata)
    assert [line["reason"] for line in lines(tmp_path / "audit.jsonl")[1:-1]] == ["TOKEN_INVALID"]
    async with serving(audit_log=str(tmp_path / "open.jsonl")) as service:
        await service.finished()
    made, ended = lines(tmp_path / "open.jsonl")[1:-1]
    assert (made["tenant"], made["subject"], ended["subject"]) == ("", "anonymous", "anonymous")
    async with serving() as service:
        assert not service.server._gate.audit.on


async def test_a_hangup_opens_the_file_again(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    settings = EngineConfig.from_settings(model="toy", port=0, audit_log=str(path))
    engine = Engine(settings, CHECKPOINT, FakeExecutor())
    running = asyncio.create_task(command.serve(Fleet.of(engine)))
    await until(lambda: engine.state is EngineState.READY)
    path.rename(tmp_path / "audit.jsonl.1")
    os.kill(os.getpid(), signal.SIGHUP)
    await until(path.exists)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await running == 0
    assert [line["action"] for line in lines(tmp_path / "audit.jsonl.1")] == ["LogOpened"]
    assert [line["action"] for line in lines(path)] == ["LogClosed"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    settings = EngineConfig.from_settings(model="toy", port=0, audit_log=str(tmp_path / "none" / "audit.jsonl"))
    with pytest.raises(ConfigError, match=r"no such file or folder\. Name a file that this user may write") as caught:
        Gate(Fleet.of(Engine(settings, CHECKPOINT, FakeExecutor())))
    assert (caught.value.reason, caught.value.violations[0].field) == ("BAD_AUDIT_LOG", "audit_log")


SHOWN = {"served_model_name"}
"""Settings whose help speaks of a file, and which name none."""


async def test_no_path_of_the_servers_machine_is_shown(tmp_path: Path) -> None:
    named = {
        option.name
        for option in options()
        if re.search(r"\b(file|folder|FILE)\b", option.help) and not isinstance(option.default, int | float)
    }
    assert named - SHOWN <= set(PATHS)
    async with audited(tmp_path, admin_address=f"unix:{tmp_path}/a") as service:
        info = await call_admin(service, f"unix:{tmp_path}/a")
    assert str(tmp_path) not in str(info)
    assert info.features["max_queue"] == "256"


async def call_admin(service: Service, address: str) -> admin_pb2.GetServerInfoResponse:
    async with aio.insecure_channel(address, options=options_for(address)) as channel:
        ask = channel.unary_unary(
            "/omni_grpc.v1.AdminService/GetServerInfo",
            request_serializer=admin_pb2.GetServerInfoRequest.SerializeToString,
            response_deserializer=admin_pb2.GetServerInfoResponse.FromString,
        )
        return await ask(admin_pb2.GetServerInfoRequest(), metadata=(("authorization", f"Bearer {token('admin')}"),))
