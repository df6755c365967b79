"""Scripts that measure GPUs alone say so where there is none, so that `make bench` goes on with the others."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.timing import SKIPPED

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
SCRIPTS = sorted(path for path in FOLDER.glob("bench_*.py") if "require_gpu()" in path.read_text())


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU to measure")
@pytest.mark.parametrize("script", [*SCRIPTS, FOLDER / "step_kernels.py"], ids=lambda path: path.stem)
def test_without_a_gpu_a_script_ends_as_skipped(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = ["FLUX.1-dev=ours fp8"] if script.stem == "step_kernels" else []
    monkeypatch.setattr(sys, "argv", [str(script), *steps])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == SKIPPED
    assert "needs a GPU" in capsys.readouterr().err


def test_the_scripts_for_gpus_alone_are_found() -> None:
    names = {path.stem for path in SCRIPTS}
    assert names >= {"bench_attention_q", "bench_blocks", "bench_heads", "bench_linear", "bench_models", "bench_vae"}
