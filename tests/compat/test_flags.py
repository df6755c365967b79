"""vLLM-Omni's short flags: answered on stderr, and nothing but flags."""

from __future__ import annotations

from pathlib import Path

import pytest

from omni_grpc.config import EngineConfig
from omni_grpc.config.settings import settings
from omni_grpc.types.errors import Code, ConfigError


def load(*argv: str, **environ: str) -> EngineConfig:
    return settings(["--model", "m", *argv], environ, prog="serve", description="")


PLAIN = EngineConfig.from_settings(model="m")


@pytest.mark.parametrize(
    ("argv", "answer"),
    [
        (["--omni"], "--omni: always on; not needed\n"),
        (["--step-execution"], "--step-execution: step execution is always on\n"),
        (
            ["--enforce-eager"],
            "--enforce-eager: nothing is compiled; --cuda-graph-tokens 0 turns CUDA graphs off\n",
        ),
        (["--omni", "--omni"], "--omni: always on; not needed\n"),
        (["--usp", "1"], "--usp: this flag is called --ulysses-degree here\n"),
        (["--ring=1", "--ring", "1"], "--ring: this flag is called --ring-degree here\n"),
        (["--ulysses-degree", "1", "--ring-degree", "1"], ""),
        ([], ""),
    ],
)
def test_a_flag_of_vllm_omni_is_answered_once(argv: list[str], answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert load(*argv) == PLAIN
    assert capsys.readouterr() == ("", answer)


@pytest.mark.parametrize(
    ("flag", "field"),
    [
        ("--usp", "ulysses_degree"),
        ("--ulysses-degree", "ulysses_degree"),
        ("--ring", "ring_degree"),
        ("--ring-degree", "ring_degree"),
    ],
)
def test_a_degree_is_the_same_under_both_names(
    flag: str, field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = "--" + field.replace("_", "-")
    asked = load(flag, "2")
    assert asked == EngineConfig.from_settings(model="m", **{field: 2})
    assert asked.parallel.sizes.world == 2
    assert capsys.readouterr().err == ("" if flag == named else f"{flag}: this flag is called {named} here\n")
    assert getattr(load(flag, "2", named, "3").parallel, field) == 3, "the last one counts"
    for degree, rule in (("0", "must be at least 1"), ("x", "expected int")):
        with pytest.raises(ConfigError, match=f"{named} is .*{rule}") as refused:
            load(flag, degree)
        assert refused.value.code is Code.INVALID_ARGUMENT
        assert [violation.field for violation in refused.value.violations] == [field]


def test_the_variable_of_an_attention_backend_is_known_and_ours_wins() -> None:
    asked = load(DIFFUSION_ATTENTION_BACKEND="TORCH_SDPA")
    assert asked.model.diffusion_attention_backend == "TORCH_SDPA"
    ours = {"OMNI_GRPC_DIFFUSION_ATTENTION_BACKEND": "FLASH_ATTN"}
    both = load(DIFFUSION_ATTENTION_BACKEND="TORCH_SDPA", **ours)
    assert both.model.diffusion_attention_backend == "FLASH_ATTN"
    flag = load("--diffusion-attention-backend", "CUDNN_ATTN", DIFFUSION_ATTENTION_BACKEND="TORCH_SDPA", **ours)
    assert flag.model.diffusion_attention_backend == "CUDNN_ATTN"
    with pytest.raises(ConfigError, match="--diffusion-attention-backend is 'NONE'"):
        load(DIFFUSION_ATTENTION_BACKEND="NONE")


@pytest.mark.parametrize("name", ["usp", "ring", "omni", "step_execution"])
def test_they_are_no_variables_and_no_keys(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"unknown setting '{name}'"):
        load(**{f"OMNI_GRPC_{name.upper()}": "1"})
    file = tmp_path / "settings.yaml"
    file.write_text(f"{name}: 1\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=f"unknown setting '{name}'"):
        load("--config", str(file))
