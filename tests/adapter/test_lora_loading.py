"""Adapters that are loaded into and unloaded from a pipeline by order, in a worker with its lanes."""

from __future__ import annotations

import itertools
import queue
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from diffusers import DiffusionPipeline
from peft.tuners.tuners_utils import BaseTunerLayer

from omni_grpc.checkpoint.registry import open_checkpoint
from omni_grpc.config import EngineConfig
from omni_grpc.resolve.request import resolve_request
from omni_grpc.resolve.rules import ServingFacts
from omni_grpc.types import shared_memory as shared
from omni_grpc.types.findings import WorkerFindings
from omni_grpc.types.load_progress import Loading
from omni_grpc.types.lora import Lora
from omni_grpc.types.media import ImageFormat
from omni_grpc.types.plan import (
    AdapterFailed,
    AdapterLoaded,
    AdapterUnloaded,
    Broken,
    Decoded,
    LoadAdapter,
    Plan,
    Prepared,
    Ready,
    Sleep,
    SleepLevel,
    Slept,
    Stepped,
    UnloadAdapter,
    Wake,
    Woken,
)
from omni_grpc.types.request import Draft
from omni_grpc.worker.worker import Worker

from . import lora_files

WANTED = {
    "stable_diffusion": {"unet": ("to_q", "conv1"), "text_encoder": ("fc1",)},
    "flux": {"transformer": ("to_q", "proj_mlp")},
    "hunyuan_video15": {"transformer": ("to_q",)},
}


class Working:
    """A worker, and what it made: the engine's part, one request at a time."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.config = EngineConfig.from_settings(
            model=str(folder), device="cpu", cpu_threads=1, diffusion_load_format="diffusers", **settings
        )
        self.checkpoint = open_checkpoint(folder, name="tiny", load_format="diffusers")
        self.reports: queue.Queue[Any] = queue.Queue()
        self.unloaded: list[AdapterUnloaded] = []
        self.worker = Worker(self.config, self.checkpoint, self.reports.put, f"omni-test-{secrets.token_hex(4)}-")
        self.worker.start()
        ready = self.next(Ready)
        self.found: WorkerFindings = ready.found
        self.checkpoint = ready.checkpoint
        self._ids = itertools.count()

    def next(self, kind: Any) -> Any:
        """The next report of this kind. What is told of unloading may come before or after that of a request."""
        if kind is AdapterUnloaded and self.unloaded:
            return self.unloaded.pop(0)
        while True:
            report = self.reports.get(timeout=60)
            if isinstance(report, AdapterUnloaded) and kind is not AdapterUnloaded:
                self.unloaded.append(report)
            elif not isinstance(report, Loading):
                assert isinstance(report, kind), report
                return report

    def load(self, file: Path, uid: str, name: str = "style", **fields: Any) -> Any:
        self.worker.order(LoadAdapter(id=name, uid=uid, path=str(file), **fields))
        told = self.next((AdapterLoaded, AdapterFailed))
        if isinstance(told, AdapterLoaded):
            self.found = self.found.with_adapter(told.adapter)
        return told

    def unload(self, uid: str) -> None:
        self.worker.order(UnloadAdapter(uid=uid))
        assert self.next(AdapterUnloaded).uid == uid
        self.found = self.found.without_adapter(uid)

    def admit(self, *loras: Lora, steps: int = 2) -> str:
        draft = Draft(
            model="tiny", prompt="a red cat", width=64, height=64, steps=steps, seeds=(3,), loras=loras,
            output_format=ImageFormat.RAW_RGB8,
        )  # fmt: skip
        facts = ServingFacts(self.checkpoint, self.config.limits, found=self.found)
        request = resolve_request(draft, facts, id=f"job_{next(self._ids)}").request
        self.worker.submit(Plan(admit=(request,)))
        return request.id

    def finish(self, job: str) -> bytes:
        finished = False
        while not finished:
            self.worker.submit(Plan(step=(job,)))
            (progress,) = self.next(Stepped).progress
            finished = progress.finished
        self.worker.submit(Plan(decode=(job,)))
        return bytes(shared.take(self.next(Decoded).media[0].data))

    def run(self, *loras: Lora) -> bytes:
        job = self.admit(*loras)
        self.next(Prepared)
        return self.finish(job)

    def layers(self) -> int:
        """Of PEFT's that are in the pipeline."""
        parts = [part for part in self.worker._runner._pipeline.components.values() if hasattr(part, "modules")]
        return sum(isinstance(module, BaseTunerLayer) for part in parts for module in part.modules())


@pytest.fixture
def working(tiny: Any) -> Iterator[Callable[..., Working]]:
    made: list[Working] = []

    def start(name: str, **settings: Any) -> Working:
        made.append(Working(tiny(name), **settings))
        return made[-1]

    yield start
    for one in made:
        one.worker.close()


@pytest.fixture
def files(tiny: Any, tmp_path: Path) -> Callable[[str], list[Path]]:
    def written(name: str) -> list[Path]:
        pipeline = DiffusionPipeline.from_pretrained(tiny(name), local_files_only=True)
        made = [lora_files.peft(pipeline, WANTED[name], seed=seed, rank=2 + seed) for seed in (1, 2)]
        return [lora_files.save(one, tmp_path / f"{number}.safetensors") for number, one in enumerate(made)]

    return written


STYLE = Lora(lora_id="style", scale=0.8)


@pytest.mark.parametrize("settings", [{}, {"enable_layerwise_offload": True}], ids=["plain", "offloaded"])
@pytest.mark.parametrize("name", ["stable_diffusion", "flux"])
def test_what_is_loaded_by_order_works_as_what_is_loaded_at_start(
    name: str, settings: dict[str, Any], working: Any, files: Any
) -> None:
    one, two = files(name)
    started = working(name, lora={"style": str(one), "other": str(two)}, **settings)
    expected = {
        "none": started.run(),
        "style": started.run(STYLE),
        "other": started.run(Lora(lora_id="other", scale=0.8)),
    }
    assert len(set(expected.values())) == 3
    ordered = working(name, **settings)
    assert ordered.run() == expected["none"]
    told = ordered.load(one, "u1")
    assert isinstance(told, AdapterLoaded)
    at_start = started.found.loras[0]
    assert (told.adapter.applied, told.adapter.sha256) == (at_start.applied, at_start.sha256)
    assert told.adapter.nbytes == at_start.nbytes > 0
    assert ordered.layers() == 0, "not before a request wants it"
    assert ordered.run(STYLE) == expected["style"]
    assert ordered.run() == expected["none"]
    # another one under the same id: requests mean the newest
    ordered.load(two, "u2")
    assert ordered.run(STYLE) == expected["other"]
    ordered.unload("u2")
    assert ordered.run(STYLE) == expected["style"]
    ordered.unload("u1")
    assert ordered.layers() == 0
    assert ordered.run() == expected["none"]


def test_an_adapter_that_is_unloaded_amid_a_request_stays_until_its_end(working: Any, files: Any) -> None:
    one, two = files("stable_diffusion")
    it = working("stable_diffusion")
    it.load(one, "u1")
    expected, plain = it.run(STYLE), it.run()
    job = it.admit(STYLE)
    it.next(Prepared)
    it.worker.order(UnloadAdapter(uid="u1"))
    # reading another one meanwhile changes nothing of the one that runs
    it.load(two, "u2", "other")
    assert it.finish(job) == expected
    assert it.next(AdapterUnloaded).uid == "u1"
    assert it.layers() == 0
    assert it.run() == plain
    job = it.admit(Lora(lora_id="style", uid="u1"))
    broken = it.next(Broken)
    assert (broken.id, broken.failure.reason) == (job, "LORA_NOT_LOADED")
    assert it.run() == plain


def test_a_request_that_is_dropped_lets_go_of_its_adapter(working: Any, files: Any) -> None:
    it = working("stable_diffusion")
    plain = it.run()
    it.load(files("stable_diffusion")[0], "u1")
    job = it.admit(STYLE, steps=20)
    it.next(Prepared)
    it.worker.order(UnloadAdapter(uid="u1"))
    it.worker.submit(Plan(drop=(job,)))
    assert it.next(AdapterUnloaded).uid == "u1"
    assert it.layers() == 0
    assert it.run() == plain


def test_what_cannot_be_loaded_is_told_and_leaves_nothing(working: Any, files: Any, tmp_path: Path) -> None:
    one, _ = files("flux")
    it = working("stable_diffusion")
    plain = it.run()
    for path, fields, message in (
        (one, {}, "no key of 0.safetensors fits a layer of StableDiffusionPipeline"),
        (tmp_path / "none.safetensors", {}, "is neither a file nor a folder"),
        (one, {"sha256": "0" * 64}, "has the SHA-256"),
        (one, {"format": "kohya"}, "has the layout peft, not kohya"),
    ):
        told = it.load(path, "u1", **fields)
        assert isinstance(told, AdapterFailed)
        assert told.failure.reason == "BAD_LORA"
        assert message in told.failure.message
    told = it.load(files("stable_diffusion")[0], "u1", "style@unet")
    assert "a pipeline takes a file for all components" in told.failure.message
    assert it.layers() == 0
    assert it.run() == plain
    other = working("hunyuan_video15")
    told = other.load(files("hunyuan_video15")[0], "u1")
    assert "diffusers loads no adapters into HunyuanVideo15Pipeline" in told.failure.message


def test_a_worker_that_dropped_its_model_has_the_adapters_again(working: Any, files: Any) -> None:
    one, two = files("stable_diffusion")
    it = working("stable_diffusion", lora={"other": str(two)})
    it.load(one, "u1")
    expected = {lora: it.run(Lora(lora_id=lora)) for lora in ("style", "other")}
    for level in SleepLevel:
        it.worker.order(Sleep(level=level))
        it.next(Slept)
        it.worker.order(Wake())
        it.next(Woken)
        assert {lora: it.run(Lora(lora_id=lora)) for lora in expected} == expected


def test_settings_of_caches_are_refused_for_pipelines(tiny: Any) -> None:
    from omni_grpc.resolve.settings import check_settings
    from omni_grpc.types.errors import ConfigError

    config = EngineConfig.from_settings(model="x", lora_device_cache=1 << 20, lora={"a": "b"})
    with pytest.raises(ConfigError, match="adapters stay on the device until they are unloaded") as caught:
        check_settings(config, open_checkpoint(tiny("flux"), load_format="diffusers"))
    assert {violation.field for violation in caught.value.violations} == {"lora_device_cache"}
