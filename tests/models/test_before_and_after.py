"""What a spec says of the way in and out: called alone, by the pipeline, and beside what diffusers has for it."""

from __future__ import annotations

import dataclasses
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from torch import Tensor

from omni_grpc.checkpoint.registry import specs
from omni_grpc.pipeline.outputs import Output
from omni_grpc.types.errors import InternalError
from omni_grpc.types.media import ImageFormat, ImageInput, Inputs, VideoInput
from omni_grpc.types.request import Guidance, Request, Task
from omni_grpc.types.spec import Lazy
from omni_grpc.worker.delivery import encode
from tests.models.cases import ENTRIES
from tests.models.cases.flux import shown
from tests.models.model import Model

WIDTH, HEIGHT = 48, 32


def asked(**inputs: Any) -> Request:
    return Request(
        id="job",
        model="tiny",
        task=Task.IMAGE_EDIT,
        prompt="x",
        negative_prompt=None,
        width=WIDTH,
        height=HEIGHT,
        steps=1,
        guidance=Guidance(),
        num_outputs=1,
        seeds=(1,),
        output_format=ImageFormat.PNG,
        inputs=Inputs(**inputs),
    )


def photo(width: int = 70, height: int = 50, seed: int = 0) -> ImageInput:
    data = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return ImageInput(width, height, 3, data.tobytes())


def theirs(image: ImageInput, width: int = WIDTH, height: int = HEIGHT) -> Tensor:
    picture = PIL.Image.frombytes("RGB", (image.width, image.height), image.data)
    made: Tensor = VaeImageProcessor().preprocess(picture, height=height, width=width)[0]
    return made


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...], Any]]:
    """Every call of a function of a spec: its import string, arguments and result."""
    kept: list[tuple[str, tuple[Any, ...], Any]] = []
    real: Callable[..., Any] = Lazy.__call__

    def call(self: Lazy, *args: Any, **kwargs: Any) -> Any:
        made = real(self, *args, **kwargs)
        kept.append((self.path, args, made))
        return made

    monkeypatch.setattr(Lazy, "__call__", call)
    return kept


def test_the_server_takes_the_way_that_the_spec_says(model: Model, calls: list[Any]) -> None:
    drafts = [draft for draft in model.entry.drafts if draft.inputs != Inputs()]
    draft = dataclasses.replace((*drafts, model.entry.drafts[0])[0], steps=1, seeds=(3,))
    request = model.request(draft)
    (result,) = model.run_requests(request)
    spec = model.spec
    before = [made for path, _, made in calls if path == spec.preprocess.path]
    after = [(args, made) for path, args, made in calls if path == spec.postprocess.path]
    given = {field.name for field in dataclasses.fields(Inputs) if getattr(draft.inputs, field.name)}
    assert [set(made) for made in before if made] == ([given] if given else [])
    whole = model.pipeline.join([made for _, made in after])
    assert np.array_equal(whole.pixels, result.images[0])
    again = pickle.loads(pickle.dumps(spec))
    for (decoded,), made in after:
        alone: Output = again.postprocess(decoded)
        assert np.array_equal(alone.pixels, made.pixels)
    assert encode(model.pipeline.join([made for _, made in after]), request).data


@pytest.mark.parametrize("name", sorted(set(specs()) - {"FluxKontextPipeline"}))
def test_pictures_are_what_diffusers_makes_of_them(name: str) -> None:
    first, last = photo(), photo(20, 90, seed=1)
    clip = VideoInput(70, 50, 2, 8.0, first.data + photo(seed=2).data)
    made = specs()[name].preprocess(
        asked(first_frame=first, last_frame=last, images=(first, last), source_video=clip), {}
    )
    torch.testing.assert_close(made["first_frame"], theirs(first))
    torch.testing.assert_close(made["last_frame"], theirs(last))
    torch.testing.assert_close(made["images"], torch.stack([theirs(first), theirs(last)]))
    torch.testing.assert_close(made["source_video"], torch.stack([theirs(first), theirs(photo(seed=2))], 1))
    assert specs()[name].preprocess(asked(), {}) == {}


def test_kontext_brings_a_picture_to_a_size_that_it_knows() -> None:
    configs = {"vae": {"block_out_channels": [1, 1, 1, 1]}, "transformer": {}}
    image = shown(1920, 1080)["inputs"].images[0]
    made = specs()["FluxKontextPipeline"].preprocess(asked(images=(image,)), configs)
    torch.testing.assert_close(made["images"], theirs(image, 1392, 752)[None])


@pytest.mark.parametrize("name", sorted(specs()))
def test_pixels_are_what_diffusers_makes_of_them(name: str) -> None:
    decoded = torch.randn(2, 3, 8, 16)
    expected = (VaeImageProcessor().postprocess(decoded, output_type="np") * 255).round()
    spec = specs()[name]
    assert np.array_equal(spec.postprocess(decoded).pixels, expected)
    assert np.array_equal(spec.postprocess(decoded[1]).pixels, expected[1])
    with pytest.raises(InternalError, match="not finite"):
        spec.postprocess(torch.full((3, 8, 8), float("nan")))


def test_neither_reads_a_weight_nor_loads_a_module(tmp_path: Path) -> None:
    """In a process of its own, on a folder that has configs alone."""
    index = {"_class_name": "FluxKontextPipeline", "vae": ["diffusers", "AutoencoderKL"], "transformer": ["d", "T"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    for part, config in {"vae": {"block_out_channels": [1, 1, 1, 1]}, "transformer": {"guidance_embeds": True}}.items():
        (tmp_path / part).mkdir()
        (tmp_path / part / "config.json").write_text(json.dumps(config), encoding="utf-8")
    code = f"""
import pickle, sys
from omni_grpc.checkpoint.registry import open_checkpoint
found = open_checkpoint({str(tmp_path)!r})
request = pickle.loads({pickle.dumps(asked(images=(ImageInput(4, 2, 3, bytes(24)),)))!r})
assert "torch" not in sys.modules
assert found.spec.preprocess(request, found.configs)["images"].shape == (1, 3, 720, 1456)
assert "diffusers" not in sys.modules and "transformers" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_page_shows_how(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/adding-a-model.md").read_text(encoding="utf-8")
    code = next(part for part in page.split("```") if "spec.preprocess(" in part and part.startswith("python\n"))
    folder = ENTRIES["WanImageToVideoPipeline"].build(tmp_path / "wan")
    exec(code.removeprefix("python\n").replace('"DIR"', repr(str(folder))), {})
    assert capsys.readouterr().out == "{'first_frame': (3, 624, 624)}\n"
