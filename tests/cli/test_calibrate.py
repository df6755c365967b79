"""`omni-grpc calibrate`: what is fitted, what is chosen, and that a server goes by it."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omni_grpc import Omni
from omni_grpc.checkpoint.registry import open_checkpoint
from omni_grpc.cli.calibrate import fit, sweep
from omni_grpc.cli.calibrate.sweep import Point
from omni_grpc.cli.main import main
from omni_grpc.config import EngineConfig
from omni_grpc.config.sections import BUNDLED
from omni_grpc.feature_rules.step_cache import QUALITIES, offer
from omni_grpc.types.errors import ConfigError
from omni_grpc.types.step_cache import CacheDraft, CacheQuality, MagCache, Observation, SeaCache

LOCAL = {"device": "cpu", "cpu_threads": 1, "warm_up_seconds": 0}


def observation(
    evaluation: int, change: float, output: float, *, timestep: float = 0.0, ratio: float = 1.0
) -> Observation:
    return Observation(
        branch="cond", evaluation=evaluation, change=change, timestep=timestep, output=output, ratio=ratio
    )


# --- what is fitted ---------------------------------------------------------------------------------------------------


def test_a_polynomial_is_found_again() -> None:
    wanted = (3.0, -1.0, 0.5, 0.25, 0.01)
    changes = np.linspace(0.01, 0.9, 40)
    found = fit.polynomial([observation(1, x, float(np.polyval(wanted, x))) for x in changes], "input")
    assert found.coefficients == pytest.approx(wanted, abs=1e-6)
    assert found.explained == pytest.approx(1.0)
    assert found.lowest > 0


def test_the_signal_that_explains_more_is_taken() -> None:
    generator = np.random.default_rng(0)
    observed = [observation(step, float(generator.random()), 0.5 * step, timestep=float(step)) for step in range(1, 30)]
    assert fit.better(observed).signal == "timestep"
    assert fit.polynomial(observed, "input").explained < 0.5


def test_few_steps_give_a_polynomial_of_as_few_terms() -> None:
    found = fit.polynomial([observation(1, 0.1, 0.2), observation(2, 0.2, 0.4), observation(1, 0.1, 0.2)], "input")
    assert found.coefficients == pytest.approx((2.0, 0.0), abs=1e-9)


def test_a_curve_is_the_mean_of_requests_and_branches() -> None:
    observed = [observation(step, 0.1, 0.1, ratio=step + shift) for step in (1, 2, 3) for shift in (-0.5, 0.5)]
    found = fit.curve(observed)
    assert found.ratios == (1.0, 1.0, 2.0, 3.0)
    assert found.spread == (0.0, 0.5, 0.5, 0.5)


# --- what is chosen ---------------------------------------------------------------------------------------------------


def at(blocks_run: float, psnr: float, worst: float | None = None) -> Point:
    worst = psnr if worst is None else worst
    return Point(method="sea_cache", given={}, blocks_run=blocks_run, psnr_median=psnr, psnr_5th=worst)


def test_a_quality_is_the_fastest_setting_that_keeps_its_psnr() -> None:
    points = [at(0.9, 50), at(0.5, 39), at(0.4, 37.9), at(0.3, 33), at(0.2, 20), at(0.35, 30)]
    chosen = sweep.choose(points)
    assert {quality: point.blocks_run for quality, point in chosen.items()} == {
        CacheQuality.NEAR_LOSSLESS: 0.5, CacheQuality.BALANCED: 0.3, CacheQuality.FAST: 0.3
    }  # fmt: skip
    assert [point.blocks_run for point in sweep.frontier(points)] == [0.9, 0.5, 0.4, 0.3, 0.2]
    few_become_others = [at(0.5, 45, 30), at(0.6, 40, 37)]
    assert sweep.choose(few_become_others)[CacheQuality.NEAR_LOSSLESS].blocks_run == 0.6
    assert sweep.choose([at(0.5, 20)]) == {}
    assert sweep.choose([at(1.0, 100)]) == {}, "a cache that reuses nothing is none"


def test_a_method_by_its_name_alone_gets_its_near_lossless_setting_or_its_gentlest() -> None:
    assert sweep.own([at(0.5, 45, 37), at(0.4, 40, 36), at(0.3, 35)], "sea_cache") == at(0.4, 40, 36)
    assert sweep.own([at(1.0, 100), at(0.5, 35, 20), at(0.4, 34, 22)], "sea_cache") == at(0.4, 34, 22)
    assert sweep.own([at(1.0, 100)], "sea_cache") is None
    assert sweep.own([at(0.5, 45)], "tea_cache") is None


def test_every_setting_of_the_grid_is_tried_once() -> None:
    found = [json.dumps(each) for each in sweep.settings(tuple(sweep.GRID))]
    assert len(set(found)) == len(found)
    assert len(found) == sum(math.prod(len(values) for values in fields.values()) for fields in sweep.GRID.values())


# --- what a server makes of it ----------------------------------------------------------------------------------------


def test_what_was_measured_is_written_and_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    shutil.copytree(BUNDLED, folder)
    prompts, out = tmp_path / "prompts.txt", tmp_path / "found.json"
    prompts.write_text("a red circle\n\na blue square\n", encoding="utf-8")
    picture = tmp_path / "curve.png"
    flags = ["--model", str(folder), "--steps", "9", "--width", "64", "--height", "64", "--prompts", str(prompts)]
    flags += ["--methods", "mag_cache", "--device", "cpu", "--cpu-threads", "1", "--warm-up-seconds", "0"]
    assert main(["calibrate", *flags, "--out", str(out), "--plot", str(picture), "--write"]) == 0
    assert "near_lossless" in capsys.readouterr().out
    assert picture.read_bytes()[:4] == b"\x89PNG"
    report = json.loads(out.read_text(encoding="utf-8"))
    assert report["prompts"] == ["a red circle", "a blue square"]
    assert len(report["mag_cache"]["ratios"]) == 9
    assert len(report["curve"]) == 18
    assert {point["method"] for point in report["curve"]} == {"mag_cache"}
    # beside the checkpoint, without losing what was there
    kept = json.loads((folder / "omni_grpc.json").read_text(encoding="utf-8"))
    assert kept["step_cache"] == report["step_cache"]
    assert kept["defaults"]["width"] == 128
    checkpoint = open_checkpoint(folder)
    config = EngineConfig.from_settings(model=str(folder), cache_backend="mag_cache")
    found = offer(config, checkpoint)
    assert found is not None
    cache = found.complete(None, 9)
    assert isinstance(cache, MagCache)
    assert cache.ratios == pytest.approx(report["mag_cache"]["ratios"])
    # or as a file of the server
    with Omni(cache_backend="mag_cache", cache_config=report, **LOCAL) as omni:
        made = omni.generate("a red circle", steps=9, width=64, height=64, seed=1)
    (count,) = made.stats.cache
    assert count.method == "mag_cache"
    assert made.effective.cache == cache
    assert {"threshold", "max_skip_steps"} < report["step_cache"]["mag_cache"].keys(), "of its name alone"


def test_a_file_of_settings_is_read_behind_an_at_sign(tmp_path: Path) -> None:
    file = tmp_path / "cache.json"
    file.write_text('{"threshold": 0.7}', encoding="utf-8")
    config = EngineConfig.from_settings(model="demo", cache_backend="sea_cache", cache_config=f"@{file}")
    assert config.cache is not None
    assert config.cache.cache_config == {"threshold": 0.7}
    for bad in (f"@{tmp_path / 'missing.json'}", "@", f"@{tmp_path}"):
        with pytest.raises(ConfigError, match="expected a JSON object, or @FILE with one"):
            EngineConfig.from_settings(model="demo", cache_backend="sea_cache", cache_config=bad)


@pytest.mark.parametrize(
    ("settings", "field", "why"),
    [
        ({"cache_backend": "sea_cache", "cache_quality": "fast"}, "cache_quality", "chooses the method itself"),
        ({"cache_quality": "fast"}, "cache_quality", "needs --cache-backend"),
        ({"cache_config": {"threshold": 1}}, "cache_config", "needs --cache-backend"),
        ({"cache_backend": "auto", "cache_config": {"threshold": 1}}, "cache_config", "has no effect"),
        ({"cache_backend": "sea_cache", "cache_config": {"thresh": 1}}, "cache_config", "unknown keys thresh"),
        ({"cache_backend": "sea_cache", "cache_config": {"threshold": -1}}, "cache_config", "threshold is -1"),
        ({"cache_backend": "cache_dit", "cache_config": {"taylorseer_order": 5}}, "cache_config", "from 0 to 2"),
        (
            {"cache_backend": "auto", "cache_config": {"step_cache": {"x": {}}}},
            "cache_config",
            "step_cache.x is unknown",
        ),
        (
            {"cache_backend": "auto", "cache_config": {"step_cache": {"fast": {"sea_cache": {"threshold": "x"}}}}},
            "cache_config",
            "step_cache.fast.threshold is 'x'",
        ),
    ],
)
def test_what_a_server_cannot_do_stops_its_start(settings: dict[str, Any], field: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Omni(**settings, **LOCAL)
    assert [(violation.field, why in violation.description) for violation in caught.value.violations] == [(field, True)]


def test_ratios_that_are_not_known_stop_the_start(tiny_qwen_image: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Omni(str(tiny_qwen_image), cache_backend="mag_cache", **LOCAL)
    ((field, why),) = ((violation.field, violation.description) for violation in caught.value.violations)
    assert field == "cache_backend"
    assert "needs the magnitude ratios" in why


def test_the_bundled_model_comes_with_its_own() -> None:
    found = offer(EngineConfig.from_settings(model=str(BUNDLED), cache_backend="auto"), open_checkpoint(BUNDLED))
    assert found is not None
    assert found.qualities.keys() == set(CacheQuality)
    assert all(found.qualities[quality] != QUALITIES[quality] for quality in CacheQuality)
    mag = found.complete(CacheDraft(method="mag_cache"), 20)
    assert isinstance(mag, MagCache)
    assert len(mag.ratios) == 20
    with Omni(cache_backend="auto", cache_quality="balanced", **LOCAL) as omni:
        made = omni.generate("a red circle", width=64, height=64, seed=1)
    (count,) = made.stats.cache
    assert count.method == next(iter(found.qualities[CacheQuality.BALANCED]))
    assert count.blocks_run < 0.6 * count.blocks


# --- what a request gets ----------------------------------------------------------------------------------------------


def test_a_quality_is_resolved_per_model_and_too_few_steps_get_none() -> None:
    measured = {"step_cache": {"balanced": {"sea_cache": {"threshold": 0.42}}}}
    checkpoint = open_checkpoint(BUNDLED)
    config = EngineConfig.from_settings(model=str(BUNDLED), cache_backend="auto", cache_config=measured)
    found = offer(config, checkpoint)
    assert found is not None
    cache = found.complete(CacheDraft(quality=CacheQuality.BALANCED), 20)
    assert isinstance(cache, SeaCache)
    assert cache.threshold == 0.42
    assert found.complete(None, 20) is not None
    assert found.complete(None, 7) is None
    assert found.complete(CacheDraft(method="sea_cache"), 7) is not None, "one that is named is used"


@pytest.mark.parametrize(
    ("method", "given", "expected"),
    [
        (
            "cache_dit",
            {"Fn_compute_blocks": 8, "Bn_compute_blocks": 1},
            {"fn_compute_blocks": 8, "bn_compute_blocks": 1},
        ),
        ("cache_dit", {"enable_taylorseer": True}, {"taylorseer_order": 1}),
        ("cache_dit", {"enable_taylorseer": True, "taylorseer_order": 2}, {"taylorseer_order": 2}),
        ("cache_dit", {"enable_taylorseer": False, "taylorseer_order": 2}, {"taylorseer_order": 0}),
        ("cache_dit", {"max_cached_steps": -1, "scm_steps_mask_policy": None}, {"max_cached_steps": 0}),
        ("sea_cache", {"sea_threshold": 0.3, "sea_power_exp": 3.0}, {"threshold": 0.3, "power_exp": 3.0}),
        ("mag_cache", {"mag_threshold": 0.1, "mag_ratios": [1.0, 0.9]}, {"threshold": 0.1, "ratios": (1.0, 0.9)}),
    ],
)
def test_names_of_peers_are_taken(method: str, given: dict[str, Any], expected: dict[str, Any]) -> None:
    config = EngineConfig.from_settings(model=str(BUNDLED), cache_backend=method, cache_config=given)
    found = offer(config, open_checkpoint(BUNDLED))
    assert found is not None
    cache = found.complete(None, 20)
    assert {name: getattr(cache, name) for name in expected} == expected
