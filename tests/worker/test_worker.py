"""The worker's lanes, with a real model."""

import dataclasses
import queue
import secrets
import weakref

import pytest

from omni_grpc.checkpoint.registry import open_checkpoint
from omni_grpc.config import EngineConfig
from omni_grpc.resolve.request import resolve_request
from omni_grpc.resolve.rules import ServingFacts
from omni_grpc.types import shared_memory as shared
from omni_grpc.types.errors import Code, Failure
from omni_grpc.types.load_progress import Loading, LoadPhase
from omni_grpc.types.plan import (
    Broken,
    Decoded,
    Died,
    Plan,
    Prepared,
    Ready,
    Sleep,
    SleepLevel,
    Slept,
    Stepped,
    Unmoved,
    Wake,
    Woken,
)
from omni_grpc.types.request import Draft
from omni_grpc.worker.worker import Worker


@pytest.fixture
def config(tiny_qwen_image):
    return EngineConfig.from_settings(model=str(tiny_qwen_image), device="cpu", cpu_threads=1)


@pytest.fixture
def worker(config):
    reports = queue.Queue()
    checkpoint = open_checkpoint(config.model.model, name="tiny")
    worker = Worker(config, checkpoint, reports.put, f"omni-test-{secrets.token_hex(4)}-")
    worker.start()
    told = list(iter(lambda: reports.get(timeout=60), Loading(phase=LoadPhase.WARMING_UP)))
    assert {one.component for one in told} == {"text_encoder", "transformer", "vae"}
    assert [one.done_bytes for one in told] == sorted({one.done_bytes for one in told}), "more with each component"
    assert all(0 <= one.done_bytes < one.total_bytes for one in told)
    yield worker, reports, checkpoint, config
    worker.close()


def request(checkpoint, config, name="job_1", steps=2):
    draft = Draft(model="tiny", prompt="a star", width=32, height=32, steps=steps, seeds=(1,))
    return resolve_request(draft, ServingFacts(checkpoint, config.limits), id=name).request


def test_a_request_goes_through_the_lanes(worker):
    it, reports, checkpoint, config = worker
    ready = reports.get(timeout=60)
    assert isinstance(ready, Ready)
    assert (ready.device, ready.dtype) == ("cpu", "float32")
    assert ready.weight_bytes > 1_000_000
    it.submit(Plan(admit=(request(checkpoint, config),)))
    prepared = reports.get(timeout=60)
    assert isinstance(prepared, Prepared)
    assert prepared.prompt_tokens > 0
    for step in (1, 2):
        it.submit(Plan(step=("job_1",)))
        stepped = reports.get(timeout=60)
        assert isinstance(stepped, Stepped)
        assert stepped.progress[0].step == step
    it.submit(Plan(decode=("job_1",)))
    decoded = reports.get(timeout=60)
    assert isinstance(decoded, Decoded)
    assert len(shared.take(decoded.media[0].data)) == decoded.media[0].data.size
    assert (it._runner._held, it._wanted) == ({}, set())


def _result(it, reports, checkpoint, config):
    it.submit(Plan(admit=(request(checkpoint, config),)))
    reports.get(timeout=60)
    for _ in range(2):
        it.submit(Plan(step=("job_1",)))
        reports.get(timeout=60)
    it.submit(Plan(decode=("job_1",)))
    return bytes(shared.take(reports.get(timeout=60).media[0].data))


def _next(reports):
    while isinstance(report := reports.get(timeout=60), Loading):
        pass
    return report


@pytest.mark.parametrize("level", SleepLevel)
def test_a_worker_that_has_slept_makes_what_it_made_before(worker, level):
    it, reports, checkpoint, config = worker
    loaded = reports.get(timeout=60)
    before = _result(it, reports, checkpoint, config)
    weights = [weakref.ref(parameter) for parameter in it._runner._pipeline.parameters()]
    assert sum(weight().nbytes for weight in weights) == loaded.weight_bytes <= loaded.device_bytes
    it.order(Sleep(level=level))
    slept = _next(reports)
    assert isinstance(slept, Slept)
    dropped = level is SleepLevel.DROP_WEIGHTS
    # on a CPU there is no device memory beside the host's, and what is kept stays where it is
    assert slept.freed_bytes >= loaded.device_bytes if dropped else slept.freed_bytes == 0
    assert all((weight() is None) == dropped for weight in weights)
    it.order(Sleep(level=SleepLevel.KEEP_WEIGHTS))
    assert _next(reports).freed_bytes == 0
    assert hasattr(it, "_runner") == (level is SleepLevel.KEEP_WEIGHTS)
    it.order(Wake())
    woken = _next(reports)
    assert isinstance(woken, Woken)
    # only what was loaded anew has something new to tell
    assert (woken.ready is not None) == (level is SleepLevel.DROP_WEIGHTS)
    assert woken.ready is None or woken.ready.weight_bytes == loaded.weight_bytes
    assert _result(it, reports, checkpoint, config) == before


def test_a_model_that_cannot_be_loaded_again_stays_asleep_and_its_worker_alive(worker):
    it, reports, checkpoint, _ = worker
    reports.get(timeout=60)
    it.order(Sleep(level=SleepLevel.DROP_WEIGHTS))
    _next(reports)
    it._checkpoint = dataclasses.replace(checkpoint, path=checkpoint.path / "gone")
    it.order(Wake())
    assert isinstance(_next(reports), Unmoved)
    it._checkpoint = checkpoint
    it.order(Wake())
    assert isinstance(_next(reports), Woken)


def test_a_request_dropped_before_its_decode_is_reported_and_logged_as_no_defect(worker, caplog):
    it, reports, checkpoint, config = worker
    reports.get(timeout=60)
    it.submit(Plan(admit=(request(checkpoint, config),)))
    reports.get(timeout=60)
    it.submit(Plan(drop=("job_1",)))
    it.submit(Plan(decode=("job_1",)))
    broken = reports.get(timeout=60)
    assert isinstance(broken, Broken)
    assert (broken.phase, broken.failure.code) == ("decode", Code.CANCELLED)
    assert caplog.records == []


def _breaks_at_prepare(it, checkpoint, config):
    it._runner.prepare = lambda request: 1 / 0
    it.submit(Plan(admit=(request(checkpoint, config),)))


def _breaks_at_decode(it, checkpoint, config):
    it.submit(Plan(decode=("job_1",)))


def _breaks_at_decode_part(it, checkpoint, config):
    it.submit(Plan(decode_parts=("job_1",)))


def _breaks_at_step(it, checkpoint, config):
    told = Broken(id="job_1", phase="step", failure=LOST)
    it._runner.step = lambda ids: Stepped(elapsed=0.0, progress=(), broken=(told,))
    it.submit(Plan(step=("job_1",)))


def _breaks_a_lane(it, checkpoint, config):
    it._runner.step = lambda ids: 1 / 0
    it.submit(Plan(step=("job_1",)))


LOST = Failure(code=Code.UNAVAILABLE, reason="DEVICE_LOST", message="an illegal memory access")


@pytest.mark.parametrize(
    "breaks", [_breaks_at_prepare, _breaks_at_step, _breaks_at_decode, _breaks_at_decode_part, _breaks_a_lane]
)
def test_a_request_that_breaks_with_its_device_is_the_workers_end(worker, monkeypatch, breaks):
    """tests/worker/test_lost_device.py provokes it on a GPU."""
    it, reports, checkpoint, config = worker
    assert isinstance(reports.get(timeout=60), Ready)
    monkeypatch.setattr("omni_grpc.worker.worker.device_lost", lambda: LOST)
    breaks(it, checkpoint, config)
    assert reports.get(timeout=60) == Died(failure=LOST)


def test_a_request_dropped_while_it_is_prepared_leaves_nothing(worker):
    it, reports, checkpoint, config = worker
    reports.get(timeout=60)
    it.submit(Plan(admit=(request(checkpoint, config),)))
    it.submit(Plan(drop=("job_1",)))
    assert isinstance(reports.get(timeout=60), Prepared)
    assert it._runner._held == {}


def test_a_failure_in_prepare_is_that_requests_report(worker, monkeypatch):
    it, reports, checkpoint, config = worker
    reports.get(timeout=60)

    def explode(request):
        raise ValueError("no such tensor")

    monkeypatch.setattr(it._runner._pipeline, "prepare", explode)
    it.submit(Plan(admit=(request(checkpoint, config),)))
    broken = reports.get(timeout=60)
    assert (broken.id, broken.phase, broken.failure.code) == ("job_1", "prepare", Code.INTERNAL)
    assert "ValueError while preparing job_1: no such tensor" in broken.failure.message


def test_a_checkpoint_that_does_not_load_is_reported_by_name(config, tmp_path, tiny_qwen_image):
    import shutil

    folder = tmp_path / "broken"
    shutil.copytree(tiny_qwen_image, folder)
    for file in (folder / "transformer").glob("*.safetensors"):
        file.unlink()
    reports = queue.Queue()
    worker = Worker(config, open_checkpoint(folder, name="tiny"), reports.put, "omni-test-")
    worker.start()
    while isinstance(died := reports.get(timeout=60), Loading):
        pass
    assert isinstance(died, Died)
    assert died.failure.reason == "BAD_CHECKPOINT"
    worker.close()


def test_a_lane_that_cannot_report_takes_the_worker_down_rather_than_hang(worker, monkeypatch):
    it, reports, *_ = worker
    reports.get(timeout=60)

    def explode(ids):
        raise RuntimeError("a defect outside of every guard")

    monkeypatch.setattr(it._runner, "step", explode)
    it.submit(Plan(step=("job_1",)))
    died = reports.get(timeout=60)
    assert isinstance(died, Died)
    assert "a defect outside of every guard" in died.failure.message
