"""From a command line and a call to the reply: settings turn features on, requests use them, replies tell of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from omni_grpc import Omni
from omni_grpc.cli.main import main
from omni_grpc.types.errors import ConfigError, InvalidArgument
from omni_grpc.types.events import Event, StepProgress
from omni_grpc.types.lora import AppliedLora
from omni_grpc.types.media import ImageFormat
from omni_grpc.types.step_cache import TeaCache
from tests.features.suite import FIRST, SECOND, Suite
from tests.models.cases import ENTRIES

SMALL = {"width": 32, "height": 32, "seed": 7, "output_format": ImageFormat.RAW_RGB8}
LOCAL = {"device": "cpu", "cpu_threads": 1, "warm_up_seconds": 0}


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Suite:
    return Suite(ENTRIES["QwenImagePipeline"], tmp_path_factory.mktemp("qwen"))


def test_a_call_uses_what_the_settings_turn_on_and_is_told(suite: Suite) -> None:
    settings = {
        "cache_backend": "tea_cache",
        "cache_config": {"rel_l1_thresh": 1e6},
        "quantization": "int8",
        "enable_layerwise_offload": True,
        **suite.lora,
    }
    events: list[Event] = []
    with Omni(str(suite.folder), **LOCAL, **settings) as omni:
        made = omni.generate("a star", steps=4, loras={FIRST: 0.5, SECOND: 1.0}, on_event=events.append, **SMALL)
        again = omni.generate("a star", steps=4, loras={FIRST: 0.5, SECOND: 1.0}, **SMALL)
        other = omni.generate("a star", steps=4, loras={FIRST: 0.5}, **SMALL)
        with pytest.raises(InvalidArgument, match="'third' is not loaded; loaded: first, second"):
            omni.generate("a star", loras={"third": 1.0}, **SMALL)
    assert [event.rows_reused for event in events if isinstance(event, StepProgress)] == [0, 1, 1, 0]
    assert made.stats.steps_cached == 2
    assert [(count.hits, count.misses) for count in made.stats.cache] == [(2, 2)]
    effective = made.effective
    assert isinstance(effective.cache, TeaCache)
    assert (effective.cache.rel_l1_thresh, effective.cache.coefficients[0]) == (1e6, -450.0)
    assert effective.quantized_layers == {"int8": 16}
    assert effective.loras == (
        AppliedLora(lora_id=FIRST, scale=0.5, target="transformer", keys_applied=68, keys_skipped=0),
        AppliedLora(lora_id=SECOND, scale=1.0, target="transformer", keys_applied=85, keys_skipped=2),
    )
    assert made.files == again.files != other.files


def test_a_setting_that_the_model_does_not_have_stops_the_start(suite: Suite) -> None:
    with pytest.raises(ConfigError, match="'taylorseer' is not a step cache for QwenImagePipeline, which is native"):
        Omni(str(suite.folder), cache_backend="taylorseer", **LOCAL)


def test_a_command_line_loads_adapters_and_uses_them(
    suite: Suite, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "o.png"
    command = ["generate", "a star", "--out", str(out), "--model", str(suite.folder), "--width", "32", "--height", "32"]
    adapters = [flag for name, path in suite.adapters.items() for flag in ("--lora", f"{name}={path}")]
    flags = ["--steps", "2", "--device", "cpu", "--cpu-threads", "1", "--quiet", "--json", "--quantization", "int8"]
    assert main([*command, *adapters, *flags, "--adapter", f"{FIRST}=0.5", "--adapter", SECOND]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [(lora["lora_id"], lora["scale"]) for lora in record["effective"]["loras"]] == [(FIRST, 0.5), (SECOND, 1.0)]
    assert record["effective"]["quantized_layers"] == {"int8": 16}
