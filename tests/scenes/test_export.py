"""The checkpoint that is made of a trained state: the same each time, and the same picture by diffusers and by us."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLQwenImage, QwenImagePipeline
from PIL import Image
from safetensors.torch import load_file

from omni_grpc import Omni
from omni_grpc.checkpoint.registry import open_checkpoint
from omni_grpc.cli.bench.accuracy import captions
from omni_grpc.config import BUNDLED, LimitsConfig
from omni_grpc.pipeline.preview import latent_preview
from omni_grpc.pipeline.schedule import Levels, Schedule, dynamic_shift
from omni_grpc.resolve.request import resolve_request
from omni_grpc.resolve.rules import ServingFacts
from omni_grpc.scenes.captions import known_words
from omni_grpc.types.request import Draft
from tools.train_demo import autoencoder, colours, export, samples
from tools.train_demo.loop import SHIFT

ROOT = Path(__file__).resolve().parents[2]
PARITY = 45.0
"""dB that ours and diffusers' picture of one seed are alike, at least."""
CASES = [("a red circle left of a blue square", 128, 128, 7), ("Three green stars on white.", 192, 128, 8)]


@pytest.fixture(scope="module")
def folder(exported: Path) -> Path:
    """The model that comes with the package, where it is there: a trained one is what counts."""
    return BUNDLED if BUNDLED.is_dir() else exported


def test_another_process_makes_the_same_files(state: Path, exported: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.train_demo.export", str(state), str(tmp_path / "again")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert export.digest(tmp_path / "again") == export.digest(exported)
    assert export.digest(exported) in done.stdout


def test_it_is_small_and_says_what_it_is(exported: Path, folder: Path) -> None:
    assert sum(file.stat().st_size for file in export.files(folder)) <= export.LARGEST == 12_000_000
    checkpoint = open_checkpoint(exported)
    assert checkpoint.spec.name == "QwenImagePipeline"
    assert checkpoint.known_words == set(known_words())
    defaults = checkpoint.defaults
    assert (defaults.width, defaults.height, defaults.steps, defaults.negative_prompt) == (128, 128, 20, "")
    assert checkpoint.latent_rgb is not None
    assert len(checkpoint.latent_rgb.factors) == 16
    card = (exported / "README.md").read_text(encoding="utf-8")
    assert "license: apache-2.0" in card
    assert "| one object, some with a size or a position | 96.0% |" in card
    assert "| last loss of the denoiser | 0.1235 |" in card


def test_no_caption_has_a_word_that_it_does_not_know(exported: Path) -> None:
    facts = ServingFacts(open_checkpoint(exported, name="m"), LimitsConfig())
    for caption in captions(300, 2):
        draft = Draft(model="m", prompt=caption.text)
        assert resolve_request(draft, facts, id="job").warnings == (), caption.text
    for prompt in samples.DOCS:
        assert resolve_request(Draft(model="m", prompt=prompt), facts, id="job").warnings == (), prompt


def test_a_sheet_has_every_picture_with_room_for_its_prompt() -> None:
    """The documentation's grid: pictures where they belong, words below each, and none cut."""
    tints = [Image.new("RGB", (samples.EDGE, samples.EDGE), (place * 15, 0, 0)) for place in range(len(samples.DOCS))]
    sheet = samples.sheet(tints, samples.DOCS)
    wide, high = ((side - samples.GAP) // 4 for side in sheet.size)
    for place, prompt in enumerate(samples.DOCS):
        row, column = divmod(place, 4)
        x, y = samples.GAP + column * wide, samples.GAP + row * high
        assert sheet.getpixel((x, y)) == sheet.getpixel((x + 127, y + 127)) == (place * 15, 0, 0)
        below = np.asarray(sheet.crop((x, y + 130, x + wide, y + high)))
        assert below.min() < 100, prompt
        assert below[:, 1 - samples.GAP : -1].min() == 255, prompt


def test_weights_are_those_of_the_state(state: Path, exported: Path) -> None:
    given = load_file(state / "average.safetensors")
    for component, file, renamed in (
        ("transformer", "diffusion_pytorch_model.safetensors", ""),
        ("text_encoder", "model.safetensors", "model."),
    ):
        kept = load_file(exported / component / file)
        mine = {name.removeprefix(f"{component}."): x for name, x in given.items() if name.startswith(component)}
        assert len(mine) > 30
        for name, x in mine.items():
            assert kept[renamed + name].equal(x), name


def test_the_vae_loses_nothing_of_one_frame(state: Path, exported: Path) -> None:
    """What is cut away looks at frames before the first; what float16 costs is below one step of 255."""
    whole = AutoencoderKLQwenImage(**autoencoder.CONFIG).eval()
    whole.load_state_dict(load_file(state / "vae.safetensors"))
    kept = AutoencoderKLQwenImage.from_pretrained(exported / "vae", dtype=torch.float32)
    latents = torch.randn(1, 16, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert (kept.decode(latents).sample - whole.decode(latents).sample).abs().max() < 1 / 255


@pytest.mark.parametrize("tokens", [64, 256])
def test_noise_levels_are_those_of_the_training_at_any_size(folder: Path, tokens: int) -> None:
    even = np.linspace(1, 1 / 20, 20)
    config = open_checkpoint(folder).configs["scheduler"]
    schedule = Schedule(config, Levels(steps=20, sigmas=even.tolist(), mu=dynamic_shift(config, tokens)), device="cpu")
    assert schedule.sigmas[:-1] == pytest.approx(SHIFT * even / (1 + (SHIFT - 1) * even))


@pytest.mark.conformance
def test_diffusers_makes_the_same_picture(folder: Path) -> None:
    theirs = QwenImagePipeline.from_pretrained(folder, dtype=torch.float32)
    theirs.set_progress_bar_config(disable=True)
    with Omni(str(folder), device="cpu", cpu_threads=1, warm_up_seconds=0) as omni:
        for prompt, width, height, seed in CASES:
            made = omni.generate(prompt, width=width, height=height, seed=seed)
            assert made.warnings == ()
            assert made.effective.steps == 20
            wanted = theirs(
                prompt=prompt,
                negative_prompt="",
                true_cfg_scale=4.0,
                width=width,
                height=height,
                num_inference_steps=20,
                generator=torch.Generator().manual_seed(seed),
            ).images[0]
            error = np.square(np.asarray(made.images[0], float) - np.asarray(wanted, float)).mean()
            assert 10 * np.log10(255**2 / max(error, 1e-9)) >= PARITY, prompt


def test_preview_colours_are_those_of_the_picture(folder: Path) -> None:
    """Latents of scenes that the map was not fitted to, against the mean colours of their pixels."""
    checkpoint = open_checkpoint(folder)
    vae = AutoencoderKLQwenImage.from_pretrained(folder / "vae", dtype=torch.float32)
    pixels = colours.painted(8, seed=77)
    shown = np.stack([latent_preview(latents, checkpoint.latent_rgb) for latents in colours.scaled(vae, pixels)])
    wanted = torch.nn.functional.avg_pool2d(pixels, 8).permute(0, 2, 3, 1).numpy()
    for channel in range(3):
        correlation = np.corrcoef(shown[..., channel].ravel(), wanted[..., channel].ravel())[0, 1]
        assert correlation > (0.8 if folder == BUNDLED else 0.4), channel


def test_a_state_that_lacks_weights_is_refused(state: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    for file in ("vae.safetensors", "log.json"):
        (tmp_path / file).write_bytes((state / file).read_bytes())
    save_file({"transformer.x": torch.zeros(1)}, tmp_path / "average.safetensors")
    log = json.loads((tmp_path / "log.json").read_text())
    assert log["step"] == 1000
    with pytest.raises(ValueError, match=r"the state has no text_encoder\.\* weights"):
        export.export(tmp_path, tmp_path / "out")
