"""LoRA adapters on pipelines: what plain diffusers makes with the same ones, and nothing of them left behind."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch
from diffusers import AutoPipelineForImage2Image, DiffusionPipeline, FirstBlockCacheConfig
from peft.tuners.tuners_utils import BaseTunerLayer

from omni_grpc import Omni
from omni_grpc.types.errors import InternalError, InvalidArgument, OperationCancelled
from omni_grpc.types.lora import AppliedLora, Lora
from omni_grpc.types.media import ImageInput, Inputs
from omni_grpc.types.request import Draft, Task

from . import lora_files
from .conftest import GRADIENT, equal, refused, same_memory

SMALL = {"width": 64, "height": 64}
PIPELINES: dict[str, tuple[dict[str, Any], dict[str, tuple[str, ...]]]] = {
    "stable_diffusion": (SMALL, {"unet": ("to_q", "to_out.0", "conv1", "proj_in"), "text_encoder": ("q_proj", "fc1")}),
    "stable_diffusion3": (SMALL, {"transformer": ("to_q", "proj_out", "linear"), "text_encoder_2": ("v_proj",)}),
    "flux": (SMALL, {"transformer": ("to_q", "to_v", "proj_mlp", "x_embedder"), "text_encoder": ("q_proj",)}),
    "ltx": ({**SMALL, "num_frames": 9}, {"transformer": ("to_k", "to_out.0", "net.2")}),
}
"""By the name of a tiny checkpoint: what is asked for, and the layers that an adapter changes."""

ASKED = {"steps": 3, "seeds": (3,)}


class Files:
    """Two adapters for one tiny checkpoint, of different ranks, and what plain diffusers makes with them."""

    def __init__(self, name: str, checkpoint: Path, folder: Path) -> None:
        self.name, self.checkpoint = name, checkpoint
        self.size, wanted = PIPELINES[name]
        pipeline = self.pipeline()
        one = lora_files.peft(pipeline, wanted, seed=1, rank=4)
        # another one changes other layers too, and not all of these
        component, ends = next(iter(wanted.items()))
        two = lora_files.peft(pipeline, {component: (ends[0], "to_v")}, seed=2, rank=3)
        self.paths = {
            "one": lora_files.save(one, folder / "one.safetensors"),
            "two.b": lora_files.save(two, folder / "two.safetensors"),
        }
        self.keys = {"one": len(one), "two.b": len(two)}

    @property
    def setting(self) -> dict[str, str]:
        return {name: str(path) for name, path in self.paths.items()}

    def pipeline(self) -> Any:
        pipeline = DiffusionPipeline.from_pretrained(self.checkpoint, local_files_only=True)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def plain(self, adapter: Any, scales: dict[str, Any], pipeline: Any = None, **arguments: Any) -> Any:
        """What diffusers makes with these adapters and no others ever loaded."""
        pipeline = pipeline or self.pipeline()
        for name in scales:
            pipeline.load_lora_weights(str(self.paths[name]), adapter_name=name.replace(".", "_"))
        if scales:
            pipeline.set_adapters([name.replace(".", "_") for name in scales], list(scales.values()))
        same_memory(pipeline, adapter.pipeline)
        generator = torch.Generator("cpu").manual_seed(3)
        asked = {**self.size, **arguments, "num_inference_steps": 3, "output_type": "np"}
        called = {name: value for name, value in asked.items() if value is not None}
        return pipeline(prompt="a red cat", generator=generator, **called)[0]


@pytest.fixture(scope="module")
def made(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    found: dict[str, Files] = {}

    def files(name: str) -> Files:
        if name not in found:
            found[name] = Files(name, tiny(name), tmp_path_factory.mktemp(name))
        return found[name]

    return files


def loras(**scales: float) -> tuple[Lora, ...]:
    return tuple(Lora(lora_id=name.replace("_", "."), scale=scale) for name, scale in scales.items())


@pytest.mark.parametrize("name", PIPELINES)
def test_adapters_give_what_plain_diffusers_gives_with_them(name: str, made: Any, load: Any) -> None:
    """Request after request with other adapters: A, none, B, both, A, and one of scale 0."""
    files = made(name)
    adapter = load(name, lora=files.setting)
    expected = {
        "none": files.plain(adapter, {}),
        "one": files.plain(adapter, {"one": 0.7}),
        "two": files.plain(adapter, {"two.b": -0.5}),
        "both": files.plain(adapter, {"one": 0.7, "two.b": 1.0}),
    }
    asked = {
        "one": loras(one=0.7), "none": (), "two": loras(two_b=-0.5), "both": loras(one=0.7, two_b=1.0),
    }  # fmt: skip
    for case in ("one", "none", "two", "one", "both", "none", "one", "two"):
        made_here = adapter.run(**files.size, **ASKED, loras=asked[case]).output
        assert equal(made_here, expected[case]), case
    assert equal(adapter.run(**files.size, **ASKED, loras=loras(one=0.0)).output, expected["none"])
    assert equal(adapter.run(**files.size, **ASKED, loras=loras(one=0.0, two_b=-0.5)).output, expected["two"])
    outputs = [expected[case] for case in expected]
    assert not any(equal(a, b) for n, a in enumerate(outputs) for b in outputs[n + 1 :]), "each changes something"


def test_a_target_has_a_scale_of_its_own(made: Any, load: Any) -> None:
    files = made("stable_diffusion")
    adapter = load("stable_diffusion", lora=files.setting)
    asked = (Lora(lora_id="one", scale=0.7, target="unet"), Lora(lora_id="one", scale=-0.4, target="text_encoder"))
    both = files.plain(adapter, {"one": {"unet": 0.7, "text_encoder": -0.4}})
    of_unet = files.plain(adapter, {"one": {"unet": 0.7, "text_encoder": 0.0}})
    assert equal(adapter.run(**SMALL, **ASKED, loras=asked).output, both)
    assert equal(adapter.run(**SMALL, **ASKED, loras=asked[:1]).output, of_unet)
    assert not equal(both, of_unet)
    with pytest.raises(InvalidArgument, match="'vae' is not a component that 'one' changes; it changes unet, text_enc"):
        adapter.run(**SMALL, **ASKED, loras=(Lora(lora_id="one", target="vae"),))
    with pytest.raises(InvalidArgument, match=r"'three' is not loaded; loaded: one, two\.b") as caught:
        adapter.run(**SMALL, **ASKED, loras=(Lora(lora_id="three"),))
    assert refused(caught.value) == {"sampling.loras.lora_id"}


def enabled(pipeline: Any) -> int:
    """Layers of PEFT's that add something."""
    parts = [part for part in pipeline.components.values() if isinstance(part, torch.nn.Module)]
    layers = [one for part in parts for one in part.modules() if isinstance(one, BaseTunerLayer)]
    assert layers, "there are some"
    return sum(not layer.disable_adapters for layer in layers)


@pytest.mark.parametrize("name", ["stable_diffusion", "flux"])
def test_a_cancelled_and_a_failed_request_leave_no_adapter_on(
    name: str, made: Any, load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = made(name)
    adapter = load(name, lora=files.setting)
    plain = files.plain(adapter, {})
    with_one = files.plain(adapter, {"one": 1.0})
    for steps in (0, 1):
        dropped = adapter.request(**files.size, steps=5, loras=loras(one=1.0, two_b=2.0))
        adapter.runner.prepare(dropped)
        for _ in range(steps):
            adapter.runner.step((dropped.id,))
        adapter.runner.drop((dropped.id,))
        with pytest.raises(OperationCancelled):
            adapter.runner.decode(dropped.id)
        adapter.runner._last.join()
        assert enabled(adapter.pipeline) == 0
        assert equal(adapter.run(**files.size, **ASKED).output, plain)

    kind = type(adapter.pipeline.scheduler)
    original, calls = kind.step, []

    def failing(self: Any, model_output: Any, timestep: Any, sample: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(timestep)
        if len(calls) == 2:
            raise RuntimeError("made to fail")
        return original(self, model_output, timestep, sample, *args, **kwargs)

    failing.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    monkeypatch.setattr(kind, "step", failing)
    with pytest.raises(InternalError, match="made to fail"):
        adapter.run(**files.size, steps=5, loras=loras(two_b=2.0))
    monkeypatch.undo()
    assert equal(adapter.run(**files.size, **ASKED, loras=loras(one=1.0)).output, with_one)
    # refused by the pipeline's own checks, with the adapters on
    if name == "stable_diffusion":
        with pytest.raises(InvalidArgument):
            adapter.run(width=65, height=64, steps=2, loras=loras(two_b=2.0))
    assert equal(adapter.run(**files.size, **ASKED).output, plain)


def test_siblings_run_with_the_adapters_of_the_pipeline(made: Any, load: Any) -> None:
    files = made("stable_diffusion")
    adapter = load("stable_diffusion", lora=files.setting)
    picture = {"image": PIL.Image.fromarray(GRADIENT), "strength": 0.7}
    expected = {
        scale: files.plain(
            adapter,
            {"one": scale} if scale else {},
            pipeline=AutoPipelineForImage2Image.from_pipe(files.pipeline()),
            **dict.fromkeys(("width", "height")),
            **picture,
        )
        for scale in (0.0, 0.7)
    }
    source = Inputs(images=(ImageInput(64, 64, 3, GRADIENT.tobytes()),))
    asked = {"task": Task.IMAGE_TO_IMAGE, "inputs": source, "strength": 0.7, **ASKED}
    for scale in (0.7, 0.0, 0.7):
        assert equal(adapter.run(**asked, loras=loras(one=scale)).output, expected[scale])


def test_a_cache_of_diffusers_works_beside_adapters(made: Any, load: Any) -> None:
    files = made("flux")
    adapter = load("flux", lora=files.setting, cache_backend="first_block", cache_config={"threshold": 0.4})

    def cached(scales: dict[str, float]) -> Any:
        pipeline = files.pipeline()
        pipeline.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.4))
        return files.plain(adapter, scales, pipeline=pipeline)

    expected = {0.7: cached({"one": 0.7}), 0.0: cached({})}
    for scale in (0.7, 0.0, 0.7):
        assert equal(adapter.run(**SMALL, **ASKED, loras=loras(one=scale)).output, expected[scale])
    assert not equal(expected[0.0], files.plain(adapter, {})), "the cache is on"


@pytest.mark.parametrize("name", ["flux", "ltx"])
def test_blocks_that_are_offloaded_take_their_adapters_along(name: str, made: Any, load: Any) -> None:
    files = made(name)
    adapter = load(name, lora=files.setting, enable_layerwise_offload=True)
    for scales in ({"one": 0.7, "two.b": 1.0}, {}, {"one": 0.7}):
        expected = files.plain(adapter, scales)
        asked = tuple(Lora(lora_id=key, scale=scale) for key, scale in scales.items())
        assert equal(adapter.run(**files.size, **ASKED, loras=asked).output, expected)


def test_replies_say_what_was_applied(made: Any) -> None:
    files = made("stable_diffusion")
    with Omni(str(files.checkpoint), device="cpu", cpu_threads=1, served_model_name="tiny", lora=files.setting) as omni:
        draft = Draft(model="tiny", prompt="a red cat", **SMALL, steps=2, loras=loras(one=0.7, two_b=0.0))
        result = omni.run(draft)
    unet = sum(key.startswith("unet.") for key in lora_files.keys(files.paths["one"]))
    text = files.keys["one"] - unet
    assert min(unet, text) > 0
    assert result.effective.loras == (
        AppliedLora(lora_id="one", scale=0.7, target="unet", keys_applied=unet, keys_skipped=0),
        AppliedLora(lora_id="one", scale=0.7, target="text_encoder", keys_applied=text, keys_skipped=0),
        AppliedLora(lora_id="two.b", scale=0.0, target="unet", keys_applied=files.keys["two.b"], keys_skipped=0),
    )
