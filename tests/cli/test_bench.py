"""The ruler: intervals and likeness against known figures, and the command on a real engine."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest

from omni_grpc.cli.bench import accuracy, command, figures
from omni_grpc.cli.main import main
from omni_grpc.scenes.judge import Verdict
from omni_grpc.scenes.layout import arrange, paint
from omni_grpc.scenes.wish import KINDS
from omni_grpc.types.errors import ConfigError

RIGHT, WRONG = Verdict(True, True, True), Verdict(True, False, False)


def test_the_interval_of_a_share_is_that_of_wilson() -> None:
    assert figures.share(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert figures.share(0, 40) == pytest.approx((0.0, 0.0876), abs=1e-4)
    assert figures.share(1990, 2000) == pytest.approx((0.9908, 0.9973), abs=1e-4)


def test_the_interval_of_a_difference_is_that_of_matched_pairs() -> None:
    """The example of Agresti & Min 2005 with Bland's data: 1319 pairs, 256 lost, 144 won."""
    before = [True] * (212 + 256) + [False] * (144 + 707)
    after = [True] * 212 + [False] * 256 + [True] * 144 + [False] * 707
    mean, interval = figures.difference(before, after)
    assert mean == pytest.approx(-112 / 1319)
    half = 1.959964 * math.sqrt(401 - 112**2 / 1321) / 1321
    assert interval == pytest.approx((-112 / 1321 - half, -112 / 1321 + half))
    # where no pair differs, it is still an interval, and a wider one for fewer
    few, many = (figures.difference([True] * n, [True] * n) for n in (40, 2000))
    assert few[0] == many[0] == 0.0
    assert few[1][1] == -few[1][0] > many[1][1] > 0


def test_likeness_of_pictures() -> None:
    noise = np.random.default_rng(0).integers(0, 255, (32, 48, 3), dtype=np.uint8)
    assert figures.psnr(noise, noise) == math.inf
    assert figures.ssim(noise, noise) == pytest.approx(1.0)
    assert figures.psnr(noise, noise + 1) == pytest.approx(20 * math.log10(255))
    dark, light = (np.full((16, 16, 3), value, np.uint8) for value in (50, 100))
    c1 = (0.01 * 255) ** 2
    assert figures.ssim(dark, light) == pytest.approx((2 * 50 * 100 + c1) / (50**2 + 100**2 + c1))
    assert figures.ssim(noise, noise[::-1]) < 0.2
    found = accuracy.likeness([noise, noise], [noise, noise + 1])
    assert (found["same"], found["psnr_5th"]) == (1, pytest.approx(48.13, abs=0.01))


def test_captions_were_never_trained_on_and_are_the_same_each_time() -> None:
    chosen = accuracy.captions(60, 3)
    assert chosen == accuracy.captions(60, 3) != accuracy.captions(60, 4)
    assert all(caption.wish.held_out for caption in chosen)
    assert [caption.seed for caption in chosen] == list(range(3, 63))
    assert {caption.wish.kind for caption in chosen} == set(KINDS)


def test_painted_scenes_are_right_and_swapped_ones_are_not() -> None:
    chosen, rng = accuracy.captions(20, 5), random.Random(0)
    pictures = [paint(arrange(caption.wish, 128, 128, rng)) for caption in chosen]
    found = accuracy.verdicts(chosen, pictures)
    table = accuracy.by_kind(chosen, found)
    assert (
        table["all"]["right"] == table["all"]["captions"] == sum(table[k]["right"] for k in KINDS if k in table) == 20
    )
    assert table["all"]["background"] == 1.0
    swapped = accuracy.verdicts(chosen, pictures[1:] + pictures[:1])
    assert accuracy.compared(found, swapped)["difference"] < -0.9


def test_the_background_counts_where_a_caption_names_one() -> None:
    chosen = accuracy.captions(30, 1)
    named = [caption.wish.background is not None for caption in chosen]
    found = [RIGHT if has else WRONG for has in named]
    table = accuracy.by_kind(chosen, found)
    assert table["all"]["background"] == 1.0
    assert table["all"]["right"] == sum(named) < 30


def test_the_command_measures_and_compares(
    tiny_qwen_image: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    model = ["--model", str(tiny_qwen_image), "--device", "cpu", "--cpu-threads", "1", "--warm-up-seconds", "0"]
    size = ["--captions", "5", "--width", "64", "--height", "48", "--steps", "2", "--seed", "9", "--json", str(file)]
    against = ["--against", "--max-num-seqs 2", "--against", "--quantization int8"]
    assert main(["bench", "prompt-accuracy", *model, *size, *against]) == 0
    report = json.loads(file.read_text())
    base, same, int8 = report["runs"]
    assert (report["captions"], report["seed"]) == (5, 9)
    assert (base["width"], base["height"], base["steps"], base["accuracy"]["all"]["captions"]) == (64, 48, 2, 5)
    assert base["seconds_per_image"] > 0 < base["latency_median"]
    assert "against" not in base
    # another number of neighbours changes nothing that can be seen
    assert same["against"]["psnr_5th"] > 60
    assert same["against"]["difference"] == 0.0
    assert int8["quantized_layers"] == {"int8": 16}
    assert 40 < int8["against"]["psnr_median"] < accuracy.MAX_PSNR
    assert int8["against"]["same"] == 0
    out = capsys.readouterr().out
    assert out.count("95 % interval") == 3
    assert "compared with the first run: +0.00% correct" in out


def test_a_wrong_flag_is_told_before_anything_is_drawn(tiny_qwen_image: Path) -> None:
    model = ["--model", str(tiny_qwen_image)]
    with pytest.raises(ConfigError, match="did you mean --quantization"):
        command.main(["prompt-accuracy", *model, "--against", "--quantisation int8"])
    assert main(["bench", "prompt-accuracy", *model, "--widht", "3"]) == 2
