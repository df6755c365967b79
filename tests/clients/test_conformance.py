"""Every client shows the behaviours of clients/conformance/README.md, against real servers."""

from __future__ import annotations

import asyncio
import io
import itertools
import time
from typing import Any

import numpy as np
import pytest
from PIL import Image

from omni_grpc.client import Client
from omni_grpc.client.messages import state_name
from tests.client.proxy import until
from tests.clients.conftest import EDITS, LONG, SMALL, Cuttable, Guarded, Served
from tests.clients.programs import CLIENTS, PROMPT, Program, answer, sha256

pytestmark = pytest.mark.service
STEPS = SMALL["steps"]


def outputs(result: Any) -> list[dict[str, object]]:
    """Outputs as a program says them."""
    return [
        {"mime_type": artifact.mime_type, "sha256": sha256(data), "seed": artifact.seed}
        for artifact, data in zip(result.artifacts, result.files, strict=True)
    ]


async def state(client: Client, job_id: str) -> str:
    return state_name((await asyncio.to_thread(client.get_job, job_id)).state)


async def ends_as(client: Client, job_id: str, wanted: str) -> None:
    """Within a few seconds, and not when it would end by itself, or at the end of the grace for clients that vanish."""
    end = time.monotonic() + 8
    while (found := await state(client, job_id)) != wanted:
        assert time.monotonic() < end, found
        await asyncio.sleep(0.05)


async def running(client: Client, before: set[str]) -> str:
    """The job that a program has begun."""
    while True:
        new = [job.job_id for job in await asyncio.to_thread(client.list_jobs) if job.job_id not in before]
        if new and await state(client, new[0]) == "RUNNING":
            return new[0]
        await asyncio.sleep(0.02)


def known(client: Client) -> set[str]:
    return {job.job_id for job in client.list_jobs()}


def in_order(seqs: list[int]) -> bool:
    return all(a < b for a, b in itertools.pairwise(seqs))


# --- results ----------------------------------------------------------------------------------------------------------


async def test_generate(program: Program, plain: Served, expected: Any) -> None:
    said = await program.run("generate", **plain.where(), **SMALL)
    assert said["outputs"] == outputs(expected)
    assert (said["steps"], said["width"], said["warnings"]) == (STEPS, SMALL["width"], len(expected.warnings))
    assert await state(plain.client, said["job_id"]) == "SUCCEEDED"


async def test_progress(program: Program, plain: Served) -> None:
    said = await program.run("progress", **plain.where(), **SMALL)
    assert said["kinds"][:2] == ["queued", "started"]
    assert said["kinds"][-1] == "completed"
    assert {"encode_done", "step_progress", "artifact_ready"} <= set(said["kinds"])
    assert said["steps"][-1] == [STEPS, STEPS]
    assert in_order([step for step, _ in said["steps"]])


async def test_previews(program: Program, plain: Served) -> None:
    said = await program.run("previews", **plain.where(), **SMALL)
    assert said["previews"]
    assert in_order([preview["step"] for preview in said["previews"]])
    with plain.client.stream(PROMPT, model="demo", preview_every_steps=1, **SMALL) as stream:
        same = {}
        for event in stream:
            for preview in event.step_progress.previews:
                same[event.step_progress.step] = (preview.mime_type, sha256(preview.data))
    for preview in said["previews"]:
        if preview["step"] in same:
            assert (preview["mime_type"], preview["sha256"]) == same[preview["step"]]


async def test_unset(program: Program, plain: Served) -> None:
    asked = {name: value for name, value in SMALL.items() if name != "seed"}
    said = await program.run("unset", **plain.where(), **asked)
    free, *zeros = said["seeds"]
    assert zeros == [0, 0]
    assert free != 0
    assert said["same"] is True


async def test_edit(program: Program, plain: Served, tmp_path: Any) -> None:
    path = tmp_path / "red.png"
    Image.new("RGB", (64, 64), "red").save(path)
    asked = {"width": 64, "height": 64, "steps": 2, "seed": 7}
    said = await program.run("edit", **plain.where() | {"model": EDITS}, image=str(path), **asked)
    assert said["asset_id"]
    result = await asyncio.to_thread(plain.client.edit_image, PROMPT, model=EDITS, images=[path], **asked)
    assert said["outputs"] == outputs(result)


async def test_upload(program: Program, plain: Served, tmp_path: Any) -> None:
    buffer = io.BytesIO()
    noise = np.random.default_rng(7).integers(0, 256, (1400, 1400, 3), dtype=np.uint8)
    Image.fromarray(noise).save(buffer, "PNG")
    data = buffer.getvalue()
    assert len(data) > 4 << 20, "more than a message holds"
    path = tmp_path / "noise.png"
    path.write_bytes(data)
    said = await program.run("upload", **plain.where(), file=str(path))
    assert said["asset_id"]
    assert (int(said["size_bytes"]), said["sha256"]) == (len(data), sha256(data))


async def test_download(program: Program, plain: Served, proxies: Cuttable) -> None:
    big = await asyncio.to_thread(_raw, plain.client)
    for proxy in proxies.each():
        proxy.cut_after(200_000)
    said = await program.run("download", **proxies.where(plain), artifact_id=big.artifacts[0].artifact_id)
    assert said == {
        "sha256": sha256(big.files[0]),
        "size_bytes": len(big.files[0]),
    }
    assert max(proxy.connections for proxy in proxies.each()) > 1, "it was cut"


async def test_corrupt(program: Program, plain: Served, proxies: Cuttable) -> None:
    big = await asyncio.to_thread(_raw, plain.client)
    for proxy in proxies.each():
        proxy.corrupt(big.files[0][150_000:150_032])
    said = await program.run("corrupt", **proxies.where(plain), artifact_id=big.artifacts[0].artifact_id)
    assert said["error"]["reason"] == "ARTIFACT_CORRUPT"


def _raw(client: Client) -> Any:
    """An output of 300,000 bytes."""
    return client.generate_image(
        PROMPT, model="demo", output_format="raw_rgb8", **SMALL | {"width": 320, "height": 320, "steps": 1}
    )


# --- streams ----------------------------------------------------------------------------------------------------------


async def test_resume(program: Program, plain: Served, proxies: Cuttable) -> None:
    asked = SMALL | {"steps": 60}
    before = known(plain.client)
    process = await program.start("resume", **proxies.where(plain), **asked)
    job = await running(plain.client, before)
    await until_step(plain.client, job, 5)
    for proxy in proxies.each():
        proxy.cut()
    said = await answer(process)
    assert in_order(said["seqs"])
    assert said["seqs"][0] == 1
    assert (said["kinds"][0], said["kinds"][-1]) == ("queued", "completed")
    assert len(said["kinds"]) == len(said["seqs"])
    assert max(proxy.connections for proxy in proxies.each()) > 1, "it was cut"
    assert known(plain.client) - before == {job}, "the same job went on"
    result = await asyncio.to_thread(lambda: plain.client.watch_job(job).result())
    assert said["outputs"] == outputs(result)


async def until_step(client: Client, job_id: str, step: int) -> None:
    def watch() -> None:
        for event in client.watch_job(job_id):
            if event.step_progress.step >= step:
                return

    await asyncio.to_thread(watch)


async def test_watch(program: Program, plain: Served, expected: Any) -> None:
    events = list(plain.client.watch_job(expected.job_id))
    first = events[2].seq
    said = await program.run("watch", **plain.where(), job_id=expected.job_id, after_seq=first)
    assert said["seqs"] == [event.seq for event in events if event.seq > first]
    assert said["kinds"][-1] == "completed"
    assert said["outputs"] == outputs(expected)


async def test_cancel(program: Program, plain: Served) -> None:
    said = await program.run("cancel", **plain.where(), **LONG)
    await ends_as(plain.client, said["job_id"], "CANCELLED")


async def test_cancelled(program: Program, plain: Served) -> None:
    before = known(plain.client)
    process = await program.start("cancelled", **plain.where(), **LONG)
    job = await running(plain.client, before)
    await asyncio.to_thread(plain.client.cancel_job, job)
    error = (await answer(process))["error"]
    assert (error["code"], error["job_id"]) == ("CANCELLED", job)


async def test_failure(program: Program, plain: Served) -> None:
    error = (await program.run("failure", **plain.where(), run_timeout=0.2, **LONG))["error"]
    assert error["code"] == "DEADLINE_EXCEEDED"
    assert await state(plain.client, error["job_id"]) == "FAILED"


async def test_deadline(program: Program, plain: Served) -> None:
    error = (await program.run("deadline", **plain.where(), timeout=1.0, **LONG))["error"]
    assert error["code"] == "DEADLINE_EXCEEDED"
    await ends_as(plain.client, error["job_id"], "CANCELLED")


# --- refusals and retries ---------------------------------------------------------------------------------------------


async def test_fields(program: Program, plain: Served) -> None:
    error = (await program.run("fields", **plain.where(), **SMALL | {"width": 63}))["error"]
    assert error["code"] == "INVALID_ARGUMENT"
    assert "width" in error["fields"]
    assert "64" in error["fields"]["width"], "the nearest width that is possible"


async def test_names(program: Program) -> None:
    nobody = {"address": "localhost:1", "url": "http://localhost:1", "model": "demo"}
    error = (await program.run("names", **nobody, output_format="GIFF", **SMALL))["error"]
    assert error["code"] == "INVALID_ARGUMENT"
    assert "GIFF" in error["fields"]["output_format"]


async def test_idempotent(program: Program, plain: Served) -> None:
    key = f"{program.language}-{time.time_ns()}"
    asked = {"request_id": key, "other_prompt": "a green star"}
    said = await program.run("idempotent", **plain.where(), **asked, **SMALL)
    assert len(set(said["job_ids"])) == 1
    assert len(said["job_ids"]) == 2
    assert said["error"]["code"] == "ABORTED"


async def test_retry(program: Program, plain: Served, proxies: Cuttable) -> None:
    for proxy in proxies.each():
        proxy.refuse = True
    process = await program.start("retry", **proxies.where(plain))
    await until(lambda: max(proxy.connections for proxy in proxies.each()))
    await asyncio.sleep(1)
    for proxy in proxies.each():
        proxy.refuse = False
    assert set((await answer(process))["models"]) == {"demo", EDITS}


async def test_retry_info(program: Program, guarded: Guarded) -> None:
    """One runs and one waits, so there is no room for a third, until the first has ended."""
    client = guarded.server.client
    job = await asyncio.to_thread(client.create_job, PROMPT, model="demo", **LONG | {"width": 192, "height": 192})
    waits = await asyncio.to_thread(client.create_job, PROMPT, model="demo", **SMALL)
    try:
        process = await program.start("retry_info", **guarded.server.where(), token=guarded.token, **SMALL)
        await until(lambda: "TENANT_QUEUE_FULL" in guarded.audit.read_text().rpartition(waits.job_id)[2])
        made = (await answer(process))["job_id"]
        assert made not in {job.job_id, waits.job_id}
        await ends_as(client, made, "SUCCEEDED")
    finally:
        for left in (job, waits):
            await asyncio.to_thread(client.cancel_job, left.job_id)


async def test_token(program: Program, guarded: Guarded) -> None:
    tokens = ["omni_nobody_has_this_token_000000000000000000000", guarded.token]
    said = await program.run("token", **guarded.server.where(), tokens=tokens)
    assert said["error"]["code"] == "UNAUTHENTICATED"
    assert said["models"] == ["demo"]


async def test_tls(program: Program, guarded: Guarded) -> None:
    said = await program.run("tls", **guarded.server.where(), token=guarded.token, other_ca=guarded.other_ca)
    assert said["models"] == ["demo"]
    assert said["error"]["code"] == "UNAVAILABLE"
    assert said["refused"]["reason"] == "TOKEN_NEEDS_TLS"


# --- the list itself --------------------------------------------------------------------------------------------------


def test_every_behaviour_of_the_list_has_a_test() -> None:
    page = (CLIENTS / "conformance" / "README.md").read_text(encoding="utf-8")
    listed = {line.split("`")[1] for line in page.split("| behaviour |")[1].splitlines() if line.startswith("| `")}
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert tested - {"every_behaviour_of_the_list_has_a_test"} == listed
