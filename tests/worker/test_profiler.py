"""The pipeline profiler on tiny models: which targets fire, how often, and what replies tell of them."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLQwenImage

from omni_grpc import Omni, wire
from omni_grpc.checkpoint.registry import open_checkpoint
from omni_grpc.config import EngineConfig
from omni_grpc.omni import Generation
from omni_grpc.types.errors import ConfigError, InvalidArgument
from omni_grpc.types.media import ImageFormat, ImageInput, Inputs
from omni_grpc.types.request import Draft, Task
from omni_grpc.types.results import Stats
from omni_grpc.v1 import event_pb2
from omni_grpc.worker import packed
from omni_grpc.worker.build import build
from omni_grpc.worker.profiler import ProfiledRunner, Profiler

LOCAL = {"device": "cpu", "cpu_threads": 1, "warm_up_seconds": 0, "served_model_name": "tiny"}
ADAPTED = {**LOCAL, "diffusion_load_format": "diffusers"}
ON = {"enable_diffusion_pipeline_profiler": True}
SMALL = {"width": 32, "height": 32, "seed": 7, "steps": 3, "output_format": ImageFormat.RAW_RGB8}
GUIDED: dict[str, Any] = {"negative_prompt": "", "true_cfg_scale": 4.0, **SMALL}
TEXT_TO_IMAGE = {"tokenizer.forward", "text_encoder.forward", "diffuse", "vae.decode"}


def lines(caplog: pytest.LogCaptureFixture) -> list[list[str]]:
    """Of each line that the profiler wrote: request, target, milliseconds."""
    logged = [record.getMessage().split() for record in caplog.records if record.getMessage().startswith("profiler: ")]
    caplog.clear()
    return [[line[1], line[2], line[4]] for line in logged]


def check(made: Generation, logged: list[list[str]]) -> None:
    """What the reply tells is the sum of what was logged, and fits into the phases that it belongs to."""
    told = made.stats.stage_durations
    for target, spent in told.items():
        assert spent == pytest.approx(sum(float(ms) for _, of, ms in logged if of == target) / 1000, abs=1e-4)
        assert spent > 0
    assert sum(told.values()) <= made.stats.total


@pytest.fixture(autouse=True)
def logging_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "omni_grpc.worker.profiler")


def test_native_targets_fire_for_the_request_they_are_called_for(
    tiny_qwen_image: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Omni(str(tiny_qwen_image), **LOCAL, **ON) as omni:
        assert "measures vae.encode, vae.decode, diffuse, text_encoder.forward, tokenizer.forward" in caplog.text
        caplog.clear()
        guided = omni.generate("a star", num_outputs=2, **GUIDED)
        logged = lines(caplog)
        assert Counter(target for _, target, _ in logged) == {
            "tokenizer.forward": 2,
            "text_encoder.forward": 2,
            "diffuse": 1,
            "vae.decode": 2,
        }
        assert {request for request, _, _ in logged} == {guided.artifacts[0].job_id}
        check(guided, logged)
        assert guided.stats.stage_durations["text_encoder.forward"] <= guided.stats.encode
        assert guided.stats.stage_durations["diffuse"] <= guided.stats.denoise
        assert guided.stats.stage_durations["vae.decode"] <= guided.stats.decode
        plain = omni.generate("a star", **SMALL)
        logged = lines(caplog)
        assert Counter(target for _, target, _ in logged) == dict.fromkeys(TEXT_TO_IMAGE, 1)
        check(plain, logged)
    assert plain.stats.stage_durations.keys() == TEXT_TO_IMAGE


def test_targets_of_a_diffusers_pipeline(tiny_qwen_image: Path, caplog: pytest.LogCaptureFixture) -> None:
    picture = ImageInput(32, 32, 3, np.zeros((32, 32, 3), np.uint8).tobytes())
    with Omni(str(tiny_qwen_image), **ADAPTED, **ON) as omni:
        caplog.clear()
        made = omni.generate("a star", **GUIDED)
        logged = lines(caplog)
        # prompts are counted before the call, which makes more calls of the tokenizer
        calls = Counter(target for _, target, _ in logged)
        assert calls.pop("tokenizer.forward") >= 2
        assert calls == {"text_encoder.forward": 2, "diffuse": 1, "vae.decode": 1}
        assert {request for request, _, _ in logged} == {made.artifacts[0].job_id}
        check(made, logged)
        edited = omni.run(_edit(picture))
        assert Counter(target for _, target, _ in lines(caplog))["vae.encode"] == 1
        assert edited.stats.stage_durations["vae.encode"] > 0


def test_the_prediction_before_the_first_step_of_a_diffusers_pipeline_counts(tiny_qwen_image: Path) -> None:
    targets = ["diffuse", "transformer.forward"]
    with Omni(str(tiny_qwen_image), **ADAPTED, **ON, diffusion_pipeline_profiler_targets=targets) as omni:
        made = omni.generate("a star", **{**GUIDED, "steps": 2})
    told = made.stats.stage_durations
    assert told["diffuse"] > told["transformer.forward"] > 0


def _edit(picture: ImageInput) -> Any:
    return Draft(
        model="tiny", prompt="a star", task=Task.IMAGE_TO_IMAGE, inputs=Inputs(images=(picture,)), strength=0.8,
        width=32, height=32, steps=3, seeds=(7,), output_format=ImageFormat.RAW_RGB8,
    )  # fmt: skip


def test_only_what_is_listed_is_measured(tiny_qwen_image: Path, caplog: pytest.LogCaptureFixture) -> None:
    targets = ["transformer.forward", "vae.decode"]
    with Omni(str(tiny_qwen_image), **LOCAL, **ON, diffusion_pipeline_profiler_targets=targets) as omni:
        caplog.clear()
        made = omni.generate("a star", **SMALL)
    logged = lines(caplog)
    assert Counter((request, target) for request, target, _ in logged) == {
        (made.artifacts[0].job_id, "transformer.forward"): 3,
        (made.artifacts[0].job_id, "vae.decode"): 1,
    }
    check(made, logged)


def test_an_unknown_target_stops_the_start(tiny_qwen_image: Path) -> None:
    for wrong in ("vae.decoded", "unet.forward", "vae", "vae._decode"):
        with pytest.raises(InvalidArgument, match=f"no {wrong}; among what it has: diffuse, .*vae.decode") as refused:
            Omni(str(tiny_qwen_image), **LOCAL, **ON, diffusion_pipeline_profiler_targets=["diffuse", wrong])
        assert refused.value.failure.reason == "UNKNOWN_TARGET"
    with pytest.raises(ConfigError, match="targets needs --enable-diffusion-pipeline-profiler"):
        Omni(str(tiny_qwen_image), **LOCAL, diffusion_pipeline_profiler_targets=["diffuse"])


@pytest.mark.parametrize("settings", [LOCAL, ADAPTED], ids=["native", "diffusers"])
def test_it_is_off_by_default_and_leaves_everything_as_it_is(tiny_qwen_image: Path, settings: dict[str, Any]) -> None:
    def runner(**more: Any) -> Any:
        config = EngineConfig.from_settings(model=str(tiny_qwen_image), **settings, **more)
        checkpoint = open_checkpoint(tiny_qwen_image, load_format=config.model.diffusion_load_format)
        return build(config, checkpoint, "omni-test-", lambda loading: None)[0]

    off, on = runner(), runner(**ON)
    assert not isinstance(off, ProfiledRunner)
    vae = getattr(off._pipeline.vae, "module", off._pipeline.vae)
    assert type(vae) is AutoencoderKLQwenImage
    assert vae.decode.__func__ is AutoencoderKLQwenImage.decode
    assert "decode" not in vars(vae)
    wrapped = getattr(on._runner._pipeline.vae, "module", on._runner._pipeline.vae)
    assert isinstance(wrapped, AutoencoderKLQwenImage)
    assert wrapped.decode.__func__ is not AutoencoderKLQwenImage.decode
    assert isinstance(off, packed.PackedRunner) == (settings is LOCAL)


def test_a_device_is_waited_for(tiny_qwen_image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    part = torch.nn.Linear(2, 2)
    profiler = Profiler(torch.device("cuda", 0))
    profiler.time(part, {"forward": "part.forward"})
    profiler.admit("job_1")
    with profiler.work("job_1"):
        part(torch.zeros(1, 2))
    assert waited == [torch.device("cuda", 0)] * 2
    assert profiler.spent("job_1").keys() == {"part.forward"}
    profiler.forget(["job_1"])
    with profiler.work("job_1"):
        part(torch.zeros(1, 2))
    assert profiler.spent("job_1") == {}


def test_the_figures_cross_the_wire(tiny_qwen_image: Path) -> None:
    with Omni(str(tiny_qwen_image), **LOCAL, **ON) as omni:
        told = omni.generate("a star", **SMALL).stats
    message = wire.to_message(told, event_pb2.GenerationStats)
    assert message.stage_durations.keys() == TEXT_TO_IMAGE
    read = wire.from_message(Stats, message).stage_durations
    assert read == pytest.approx(told.stage_durations, abs=1e-6)
