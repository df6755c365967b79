"""The log of a real server: a line for each job that ends, none for a call that succeeds; all processes alike."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import pytest
from grpc import RpcError

from omni_grpc.config import LogConfig, start_logging
from omni_grpc.engine.scheduler import Lane
from omni_grpc.types.errors import InternalError
from omni_grpc.types.log_lines import Lines
from tests.server.process import served
from tests.server.service import Service, image, serving
from tests.telemetry.test_traces import PARENT, TRACE

PROMPT = "a red circle that nobody may read"


async def ended(service: Service, **changes: object) -> str:
    call = service.generation.GenerateImage(image(**changes), metadata=(("traceparent", PARENT),))
    job_id = ""
    try:
        async for message in call:
            job_id = message.event.job_id
    except RpcError:
        pass  # how the job ended is in the log
    return job_id


def of(caplog: pytest.LogCaptureFixture, name: str) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == name]


async def test_a_job_that_ends_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "omni_grpc")
    async with serving() as service:
        job_id = await ended(service, prompt=PROMPT, sampling={"steps": 3})
    (record,) = of(caplog, "omni_grpc.jobs")
    fields = record.fields  # type: ignore[attr-defined]
    assert record.levelname == "INFO"
    assert record.getMessage().startswith(f"{job_id} SUCCEEDED model=toy task=TEXT_TO_IMAGE width=32 height=16 ")
    assert (fields["job_id"], fields["trace_id"], fields["steps"]) == (job_id, TRACE, 3)
    assert {"queue_s", "encode_s", "denoise_s", "decode_s", "postprocess_s", "total_s", "bytes"} <= set(fields)
    assert of(caplog, "omni_grpc.server.calls") == []
    assert PROMPT not in caplog.text


async def test_a_job_that_fails_is_a_warning_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "omni_grpc")
    async with serving() as service:
        service.executor.failures[Lane.STEP] = InternalError("no such kernel", reason="WORKER_ERROR").failure
        await ended(service)
    (record,) = of(caplog, "omni_grpc.jobs")
    assert (record.levelname, record.fields["reason"]) == ("WARNING", "WORKER_ERROR")  # type: ignore[attr-defined]
    assert record.getMessage().endswith(": no such kernel")


async def test_prompts_and_calls_are_at_level_debug(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "omni_grpc")
    async with serving() as service:
        await ended(service, prompt=PROMPT)
    assert any("GenerateImage OK in" in record.getMessage() for record in of(caplog, "omni_grpc.server.calls"))
    shown = [record for record in caplog.records if PROMPT in record.getMessage()]
    assert [(record.name, record.levelname) for record in shown] == [("omni_grpc.jobs", "DEBUG")]


async def test_a_call_that_is_refused_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "omni_grpc")
    async with serving() as service:
        await ended(service, width=63)
    (record,) = of(caplog, "omni_grpc.server.calls")
    assert record.levelname == "INFO"
    assert "/omni_grpc.v1.GenerationService/GenerateImage INVALID_ARGUMENT " in record.getMessage()


def test_a_process_logs_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    levels = root.level, logging.getLogger("omni_grpc").level
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr("threading.excepthook", sys.excepthook)
    try:
        start_logging(LogConfig())
        (handler,) = root.handlers
        assert isinstance(handler, Lines)
        start_logging(LogConfig(log_format="json", log_level="debug", log_repeats=7), "worker")
        assert root.handlers == [handler]
        assert (handler.most, root.level, logging.getLogger("omni_grpc").level) == (7, logging.INFO, logging.DEBUG)
        record = logging.LogRecord("omni_grpc.x", logging.DEBUG, "", 0, "hello", None, None)
        assert json.loads(handler.format(record))["process"] == "worker"
        start_logging(LogConfig(log_level="error"))
        assert (root.level, logging.getLogger("omni_grpc").level) == (logging.ERROR, logging.ERROR)
    finally:
        logging.captureWarnings(False)
        root.setLevel(levels[0])
        logging.getLogger("omni_grpc").setLevel(levels[1])


def test_every_process_of_a_server_writes_json(tiny_qwen_image: Path, tmp_path: Path) -> None:
    flags = ("--log-format", "json", "--log-level", "debug")
    with served(tiny_qwen_image, tmp_path, *flags) as server:
        events = server.generate(steps=2)
        code, _ = server.stop()
    assert code == 0
    lines = [json.loads(line) for line in server.log.read_text().splitlines()]
    assert {"server", "worker"} <= {line["process"] for line in lines}
    assert all(line["time"].endswith("Z") and line["level"] and line["message"] for line in lines)
    (end,) = (line for line in lines if line["logger"] == "omni_grpc.jobs" and line["level"] == "INFO")
    assert (end["job_id"], end["state"], end["steps"]) == (events[0].job_id, "SUCCEEDED", 2)
    (prompt,) = (line for line in lines if "prompt" in line)
    assert prompt["prompt"] == server.image().prompt
