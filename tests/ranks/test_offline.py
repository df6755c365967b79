"""A model over ranks without a server: from Python, under vLLM-Omni's names, and from the command line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

import omni_grpc
from omni_grpc import compat
from omni_grpc.cli import main as cli
from omni_grpc.types.errors import Unavailable
from tests.ranks.group import SOON
from tools.tiny_checkpoints import BUILDERS

ROOT = Path(__file__).resolve().parents[2]
LOCAL: Mapping[str, Any] = {"device": "cpu", "cpu_threads": 1, "warm_up_seconds": 0.0, "restart_backoff": 0.0}
Config = compat.DiffusionParallelConfig
WAYS: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "tensor": (2, {"tensor_parallel_size": 2}),
    "branches": (2, {"cfg_parallel_size": 2}),
    "ring and Ulysses": (4, {"ulysses_degree": 2, "ring_degree": 2}),
    "a config": (2, {"parallel_config": Config(ulysses_degree=2), "distributed_executor_backend": "mp"}),
    "sharded weights": (2, {"parallel_config": Config(ulysses_degree=2, use_hsdp=True)}),
    "nothing but sharded weights": (2, {"parallel_config": Config(use_hsdp=True, hsdp_shard_size=2)}),
    "gathered": (2, {"allgather_degree": 2, "vae_patch_parallel_size": 2, "vae_parallel_mode": "spatial_shard_height"}),
    "replicas": (2, {"num_gpus": 2}),
}
"""Keywords of `Omni` with the number of processes that they make."""


def pictures(model: Path, **settings: Any) -> tuple[list[np.ndarray], int]:
    """What two prompts make, one of them with guidance, and how many processes the model had."""
    prompts = ["a blue square", {"prompt": "a red circle", "negative_prompt": ""}]
    sampling = compat.OmniDiffusionSamplingParams(
        width=64, height=64, num_inference_steps=3, seed=7, true_cfg_scale=3.0
    )
    with compat.Omni(str(model), **LOCAL, **settings) as omni:
        processes = omni.omni.config.processes
        outputs = omni.generate(prompts, sampling, max_num_seqs=2)
    return [np.asarray(output.images[0].convert("RGB"), dtype=int) for output in outputs], processes


@pytest.fixture(scope="module")
def alone(tiny_qwen_image: Path) -> list[np.ndarray]:
    made, processes = pictures(tiny_qwen_image)
    assert processes == 1
    assert min(picture.std() for picture in made) > 1, "there is something to be seen"
    return made


@pytest.mark.parametrize("way", WAYS)
def test_prompts_make_over_ranks_what_they_make_in_one_process(
    tiny_qwen_image: Path, alone: list[np.ndarray], way: str
) -> None:
    count, settings = WAYS[way]
    made, processes = pictures(tiny_qwen_image, **settings)
    assert processes == count
    assert max(np.abs(mine - theirs).max() for mine, theirs in zip(made, alone, strict=True)) <= 1


@pytest.mark.parametrize("settings", [{"tensor_parallel_size": 2}, {"ulysses_degree": 2, "use_hsdp": True}], ids=str)
def test_what_is_ticked_for_kontext_works(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Weights over two ranks, and sharded weights, for a model that edits a picture."""
    model = BUILDERS["flux_kontext"](tmp_path / "model")
    picture = PIL.Image.effect_noise((64, 64), 90).convert("RGB")
    options = {"width": 64, "height": 64, "steps": 3, "seed": 7}
    made = []
    for given in ({}, settings):
        with omni_grpc.Omni(str(model), **LOCAL, **given) as omni:
            made.append(np.asarray(omni.edit_image("a red circle", images=[picture], **options).images[0], dtype=int))
    assert np.abs(made[0] - made[1]).max() <= 1
    assert made[0].std() > 1


def test_a_rank_that_dies_fails_what_runs_and_the_next_call_works(
    tiny_qwen_image: Path, alone: list[np.ndarray]
) -> None:
    with omni_grpc.Omni(str(tiny_qwen_image), **LOCAL, ulysses_degree=2) as omni:
        _, second = omni._engine.replicas[0].executor._process.pids

        def kill(event: object) -> None:
            if type(event).__name__ == "StepProgress":
                os.kill(second, signal.SIGKILL)

        with pytest.raises(Unavailable, match="rank 1 of 2, process"):
            omni.generate("a blue square", width=64, height=64, steps=200, on_event=kill)
        made = omni.generate("a blue square", width=64, height=64, steps=3, seed=7).images[0]
        assert np.abs(np.asarray(made.convert("RGB"), dtype=int) - alone[0]).max() <= 1


def test_a_command_without_a_server_takes_ranks(tiny_qwen_image: Path, alone: list[np.ndarray], tmp_path: Path) -> None:
    out = tmp_path / "out.png"
    flags = ("--width", "64", "--height", "64", "--steps", "3", "--seed", "7", "--quiet", "--out", str(out))
    worker = ("--device", "cpu", "--cpu-threads", "1", "--sequence-parallel-size", "2")
    assert cli.main(["generate", "a blue square", "--model", str(tiny_qwen_image), *worker, *flags]) == 0
    assert np.abs(np.asarray(PIL.Image.open(out).convert("RGB"), dtype=int) - alone[0]).max() <= 1


@pytest.mark.parametrize("guarded", [True, False])
def test_a_script_has_to_guard_what_its_ranks_import(tiny_qwen_image: Path, tmp_path: Path, guarded: bool) -> None:
    """Without the guard each rank would start ranks of its own."""
    lines = [
        f"with Omni({str(tiny_qwen_image)!r}, device='cpu', warm_up_seconds=0.0, ring_degree=2) as omni:",
        "    print(len(omni.generate('x', width=32, height=32, steps=1).files))",
    ]
    if guarded:
        lines = ["if __name__ == '__main__':", *(f"    {line}" for line in lines)]
    script = tmp_path / "script.py"
    script.write_text("\n".join(["from omni_grpc import Omni", *lines, ""]), encoding="utf-8")
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(script)], env=environ, capture_output=True, text=True, timeout=SOON, check=False
    )
    if guarded:
        assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    else:
        assert done.returncode == 1
        assert "put the call under if __name__ == '__main__'" in done.stderr
        assert "died with exit code 1" in done.stderr.strip().splitlines()[-1]
