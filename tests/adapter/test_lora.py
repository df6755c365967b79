"""LoRA adapters on pipelines: what plain diffusers makes with the same ones, and nothing of them left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline

from omni_grpc.types.errors import ConfigError, InternalError, InvalidArgument, OperationCancelled
from omni_grpc.types.lora import Lora

from . import lora_files
from .conftest import equal, refused, same_memory

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

    def plain(self, adapter: Any, scales: dict[str, Any], **arguments: Any) -> Any:
        """What diffusers makes with these adapters and no others ever loaded."""
        pipeline = self.pipeline()
        for name in scales:
            pipeline.load_lora_weights(str(self.paths[name]), adapter_name=name.replace(".", "_"))
        if scales:
            pipeline.set_adapters([name.replace(".", "_") for name in scales], list(scales.values()))
        same_memory(pipeline, adapter.pipeline)
        generator = torch.Generator("cpu").manual_seed(3)
        called = {**self.size, **arguments, "num_inference_steps": 3, "output_type": "np"}
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
