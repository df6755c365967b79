"""The Python client's program of the shared list of behaviours: clients/conformance/README.md."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from omni_grpc_client import Client, MediaResult, OmniError

SETTINGS = ("width", "height", "steps", "seed")


def client(asked: Mapping[str, Any], **changes: Any) -> Client:
    options = {"ca": asked.get("ca"), "token": asked.get("token")} | changes
    return Client(asked["address"], **options)


def settings(asked: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    return {name: asked[name] for name in SETTINGS if name in asked} | {"model": asked["model"]} | changes


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def outputs(result: MediaResult) -> list[dict[str, object]]:
    return [
        {"mime_type": artifact.mime_type, "sha256": sha256(data), "seed": artifact.seed}
        for artifact, data in zip(result.artifacts, result.files, strict=True)
    ]


def said(error: OmniError) -> dict[str, object]:
    """An error as the list wants it."""
    return {
        "code": error.code.name,
        "reason": error.reason,
        "fields": {violation.field: violation.description for violation in error.violations},
        "retry_after": error.failure.retry_after,
        "job_id": error.failure.metadata.get("job_id", ""),
    }


def refusal(call: Callable[[], object]) -> dict[str, object]:
    """The error that a call ends with."""
    try:
        call()
    except OmniError as error:
        return said(error)
    raise AssertionError("the call succeeded")


def generate(asked: Mapping[str, Any]) -> dict[str, object]:
    with client(asked) as server:
        result = server.generate_image(asked["prompt"], **settings(asked))
    return {
        "job_id": result.job_id,
        "outputs": outputs(result),
        "steps": result.effective.steps,
        "width": result.effective.width,
        "warnings": len(result.warnings),
    }


def progress(asked: Mapping[str, Any]) -> dict[str, object]:
    with client(asked) as server, server.stream(asked["prompt"], **settings(asked)) as stream:
        events = list(stream)
    steps = [event.step_progress for event in events if event.HasField("step_progress")]
    return {
        "kinds": [event.WhichOneof("event") for event in events],
        "steps": [[step.step, step.total_steps] for step in steps],
    }


def previews(asked: Mapping[str, Any]) -> dict[str, object]:
    found = []
    options = settings(asked, preview_every_steps=1)
    with client(asked) as server, server.stream(asked["prompt"], **options) as stream:
        for event in stream:
            step = event.step_progress
            for preview in step.previews:
                found.append({"step": step.step, "mime_type": preview.mime_type, "sha256": sha256(preview.data)})
    return {"previews": found}


def unset(asked: Mapping[str, Any]) -> dict[str, object]:
    with client(asked) as server:
        free = server.generate_image(asked["prompt"], **settings(asked))
        first, second = (server.generate_image(asked["prompt"], **settings(asked, seed=0)) for _ in range(2))
    return {"seeds": [result.seeds[0] for result in (free, first, second)], "same": first.files == second.files}


def edit(asked: Mapping[str, Any]) -> dict[str, object]:
    with client(asked) as server:
        stored = server.upload(asked["image"])
        result = server.edit_image(asked["prompt"], images=[stored], **settings(asked))
    return {"asset_id": stored.asset_id, "outputs": outputs(result)}


def upload(asked: Mapping[str, Any]) -> dict[str, object]:
    with client(asked) as server:
        stored = server.upload(asked["file"])
    return {"asset_id": stored.asset_id, "size_bytes": stored.size_bytes, "sha256": stored.sha256.hex()}


def download(asked: Mapping[str, Any]) -> dict[str, object]:
    with client(asked) as server:
        data = server.download(asked["artifact_id"])
    return {"sha256": sha256(data), "size_bytes": len(data)}


def corrupt(asked: Mapping[str, Any]) -> dict[str, object]:
    return {"error": refusal(lambda: download(asked))}


def resume(asked: Mapping[str, Any]) -> dict[str, object]:
    with client(asked) as server, server.stream(asked["prompt"], **settings(asked)) as stream:
        return watched(stream)


def watch(asked: Mapping[str, Any]) -> dict[str, object]:
    with client(asked) as server:
        return watched(server.watch_job(asked["job_id"], after_seq=asked["after_seq"]))


def watched(stream: Any) -> dict[str, object]:
    events = list(stream)
    return {
        "seqs": [event.seq for event in events],
        "kinds": [event.WhichOneof("event") for event in events],
        "outputs": outputs(stream.result()),
    }


def cancel(asked: Mapping[str, Any]) -> dict[str, object]:
    with client(asked) as server, server.stream(asked["prompt"], **settings(asked)) as stream:
        for event in stream:
            if event.HasField("step_progress"):
                break
    return {"job_id": stream.job_id}


def failed(asked: Mapping[str, Any], **options: Any) -> dict[str, object]:
    with client(asked) as server:
        return {"error": refusal(lambda: server.generate_image(asked["prompt"], **settings(asked), **options))}


def failure(asked: Mapping[str, Any]) -> dict[str, object]:
    return failed(asked, run_timeout=asked["run_timeout"])


def deadline(asked: Mapping[str, Any]) -> dict[str, object]:
    return failed(asked, timeout=asked["timeout"])


def names(asked: Mapping[str, Any]) -> dict[str, object]:
    return failed(asked, output_format=asked["output_format"])


def idempotent(asked: Mapping[str, Any]) -> dict[str, object]:
    options = settings(asked, request_id=asked["request_id"])
    with client(asked) as server:
        made = [server.create_job(asked["prompt"], **options).job_id for _ in range(2)]
        return {"job_ids": made, "error": refusal(lambda: server.create_job(asked["other_prompt"], **options))}


def retry(asked: Mapping[str, Any]) -> dict[str, object]:
    return {"models": models(client(asked))}


def models(server: Client) -> list[str]:
    with server:
        return [model.name for model in server.list_models()]


def retry_info(asked: Mapping[str, Any]) -> dict[str, object]:
    with client(asked) as server:
        return {"job_id": server.create_job(asked["prompt"], **settings(asked)).job_id}


def token(asked: Mapping[str, Any]) -> dict[str, object]:
    tokens = iter(asked["tokens"])
    with client(asked, token=lambda: next(tokens)) as server:
        return {
            "error": refusal(server.list_models),
            "models": [model.name for model in server.list_models()],
        }


def tls(asked: Mapping[str, Any]) -> dict[str, object]:
    return {
        "models": models(client(asked)),
        "error": refusal(lambda: models(client(asked, ca=asked["other_ca"]))),
        "refused": refusal(lambda: Client("server.example:50051", token="secret")),
    }


BEHAVIOURS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, object]]] = {
    behaviour.__name__: behaviour
    for behaviour in (
        *(generate, progress, previews, unset, edit, upload, download, corrupt, resume, watch, cancel),
        *(failure, deadline, names, idempotent, retry, retry_info, token, tls),
    )
} | {"cancelled": failed, "fields": failed}


if __name__ == "__main__":
    given = json.load(sys.stdin)
    json.dump(BEHAVIOURS[given["behaviour"]](given), sys.stdout)
