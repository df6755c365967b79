"""The cases of the GPU script run on a CPU, as far as they go, and a case that fails says why."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import gpu_adapter
from benchmarks.gpu_adapter import CASES, MARK, build, main, run_case, table


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    torch.set_num_threads(1)
    made = tmp_path_factory.mktemp("gpu")
    with pytest.MonkeyPatch.context() as small:
        small.setattr(gpu_adapter, "SIZE", 64)
        build(made, "cpu")
        assert run_case("plain", made, "cpu")["ok"]
        assert run_case("plain LoRA", made, "cpu")["ok"]
        assert (np.load(made / "flux.npy") != np.load(made / "flux-lora.npy")).any()
        yield made


@pytest.mark.parametrize(
    "name",
    ["TORCH_SDPA", "layerwise offload", "layerwise offload without stream", "LoRA", "LoRA with layerwise offload"],
)
def test_a_case_is_compared_with_plain_diffusers(name: str, folder: Path) -> None:
    row = run_case(name, folder, "cpu")
    assert (row["ok"], row["reason"]) == (True, "")
    assert row["max_pixel_difference"] <= 1
    assert row["step_events"] == row["steps"] == gpu_adapter.STEPS
    assert row.get("same_after_cancel", True)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("SAGE_ATTN", "sageattention>=2.1.1"),
        ("model CPU offload", "needs an accelerator"),
    ],
)
def test_what_cannot_be_had_here_is_refused_as_expected(name: str, text: str, folder: Path) -> None:
    row = run_case(name, folder, "cpu")
    assert row["ok"]
    assert text in row["refused"]


def test_a_case_that_is_not_as_it_should_be_says_why(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = np.load(folder / "flux.npy")
    monkeypatch.setitem(
        CASES,
        "plain other",
        dataclasses.replace(CASES["layerwise offload without stream"], tolerance=-1),
    )
    monkeypatch.setitem(CASES, "unexpected", dataclasses.replace(CASES["SAGE_ATTN"], refused=""))
    monkeypatch.setitem(CASES, "heavy", dataclasses.replace(CASES["TORCH_SDPA"], weights=0.5))
    rows = [run_case(name, folder, "cpu") for name in ("plain other", "unexpected", "heavy")]
    assert [row["ok"] for row in rows] == [False] * 3
    assert "pixels differ by" in rows[0]["reason"]
    assert rows[1]["reason"].startswith("ATTENTION_UNAVAILABLE")
    assert "weight_bytes is 1.00 of plain diffusers'" in rows[2]["reason"]
    shown = table(rows)
    assert all(row["reason"] in shown for row in rows)
    assert np.array_equal(np.load(folder / "flux.npy"), reference)


def test_a_process_tells_its_row_in_one_line(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr(
        "sys.argv",
        ["gpu_adapter", "--device", "cpu", "--one", "SAGE_ATTN", str(folder)],
    )
    assert main() == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(MARK)]
    assert json.loads(line.removeprefix(MARK))["case"] == "SAGE_ATTN"
