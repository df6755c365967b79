"""`python -m omni_grpc.serve` with ranks, as its users start it, and what it refuses before any process starts."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import PIL.Image
import psutil
import pytest

from omni_grpc import Omni
from omni_grpc.checkpoint.registry import open_model
from omni_grpc.config import EngineConfig
from omni_grpc.resolve import ranks as rules
from omni_grpc.resolve.settings import apply_settings
from omni_grpc.types.errors import ConfigError
from omni_grpc.types.ranks import RENDEZVOUS
from tests.server.process import data_of, served


def _workers(pid: int) -> list[psutil.Process]:
    children = psutil.Process(pid).children()
    return [child for child in children if "spawn_main" in " ".join(child.cmdline())]


def _pixels(data: bytes) -> np.ndarray:
    return np.asarray(PIL.Image.open(io.BytesIO(data)).convert("RGB"), dtype=int)


@pytest.mark.service
def test_a_server_with_ranks_generates_as_one_process_does(tiny_qwen_image: Path, tmp_path: Path) -> None:
    """Also after a rank was killed. The second flag is an alias, which the log answers."""
    flags = ("--device", "cpu", "--warm-up-seconds", "0", "--restart-backoff", "0", "--usp", "2")
    with Omni(str(tiny_qwen_image), device="cpu", warm_up_seconds=0.0) as omni:
        prompt = "a red circle left of a blue square"
        made = omni.generate(prompt, negative_prompt="", width=64, height=64, steps=4, seed=7)
    with served(tiny_qwen_image, tmp_path, *flags) as server:
        assert "--usp: this flag is called --ulysses-degree here" in server.log.read_text()
        first, second = _workers(server.popen.pid)
        ours = _pixels(data_of(server.generate()))
        assert np.abs(ours - _pixels(made.files[0])).max() <= 1
        assert ours.std() > 1
        second.kill()
        again = server.generate()
        assert np.array_equal(_pixels(data_of(again)), ours)
        others = _workers(server.popen.pid)
        assert len(others) == 2
        assert not {first.pid, second.pid} & {other.pid for other in others}
        code, rest = server.stop()
        assert (code, rest) == (0, "")
        assert f"rank 1 of 2, process {second.pid} died by signal SIGKILL" in server.log.read_text()
    assert not any(psutil.pid_exists(worker.pid) for worker in (first, second, *others))


def _refused(model: Path, **settings: object) -> tuple[list[str], str]:
    """The fields and the message of what is refused once the model is known."""
    config = EngineConfig.from_settings(model=str(model), **{"device": "cpu"} | settings)
    with pytest.raises(ConfigError) as refused:
        open_model(config.model, apply=lambda found: apply_settings(config, found))
    assert refused.value.reason == "RANKS_DO_NOT_FIT"
    return [violation.field for violation in refused.value.violations], str(refused.value)


@pytest.mark.parametrize(
    ("settings", "field", "said"),
    [
        ({"ulysses_degree": 3}, "ulysses_degree", "--ulysses-degree is 3, which cannot share 4 heads evenly; the near"),
        ({"cfg_parallel_size": 3}, "cfg_parallel_size", "the nearest value that works is 2"),
        ({"use_hsdp": True}, "use_hsdp", "--use-hsdp needs ranks that share tokens"),
        ({"hsdp_shard_size": 2}, "hsdp_shard_size", "--hsdp-shard-size has no effect without use_hsdp"),
        ({"enable_expert_parallel": True}, "enable_expert_parallel", "has no experts"),
        ({"ring_degree": 2, "vae_patch_parallel_size": 3}, "vae_patch_parallel_size", "has to divide the 2 ranks"),
        (
            {"ring_degree": 2, "vae_patch_parallel_size": 2, "vae_use_tiling": True},
            "vae_patch_parallel_size",
            "must be 1 beside --vae-use-tiling",
        ),
        (
            {"ulysses_degree": 2, "use_hsdp": True, "enable_layerwise_offload": True},
            "use_hsdp",
            "must be off beside --enable-layerwise-offload",
        ),
        (
            {"tensor_parallel_size": 2, "quantization": "gguf", "gguf_model": "model.gguf"},
            "tensor_parallel_size",
            "must be 1 beside --quantization gguf, whose blocks parts of rows cut; share tokens instead",
        ),
        (
            {"tensor_parallel_size": 4, "batch_invariant": True},
            "tensor_parallel_size",
            "must be 2 at most beside --batch-invariant",
        ),
        (
            {"ring_degree": 2, "diffusion_attention_config": {"default": {"precision": "fp8"}}},
            "ring_degree",
            "must be 1 beside attention in FP8_ATTN (default), which gives no log-sum-exp",
        ),
        (
            {"ring_degree": 2, "diffusion_attention_config": {"schedule": [{"precision": "int8"}]}},
            "ring_degree",
            "must be 1 beside attention in INT8_ATTN (schedule[0])",
        ),
        (
            {"ring_degree": 2, "diffusion_attention_config": {"per_role": {"self": "OMNI_CPU"}}},
            "ring_degree",
            "must be 1 beside attention in OMNI_CPU (per_role.self)",
        ),
        ({"ring_degree": 2, "cuda_graph_tokens": 64}, "cuda_graph_tokens", "does not work with ranks"),
    ],
)
def test_what_ranks_cannot_do_is_refused_by_its_setting(
    tiny_qwen_image: Path, settings: dict[str, object], field: str, said: str
) -> None:
    fields, message = _refused(tiny_qwen_image, **settings)
    assert fields == [field]
    assert said in message


def test_what_a_ring_can_merge_is_not_refused(tiny_qwen_image: Path) -> None:
    """Other precisions, and a backend that gives what parts are merged by."""
    chosen = {"default": {"backend": "TORCH_SDPA"}, "schedule": [{"precision": "bf16"}]}
    config = EngineConfig.from_settings(
        model=str(tiny_qwen_image), device="cpu", ring_degree=2, diffusion_attention_config=chosen
    )
    open_model(config.model, apply=lambda found: apply_settings(config, found))


def test_more_ranks_than_devices_are_refused_where_devices_can_be_counted(
    tiny_qwen_image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(rules, "GPUS", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    two = {"device": "cuda", "ring_degree": 2}
    config = EngineConfig.from_settings(model=str(tiny_qwen_image), **two)
    open_model(config.model, apply=lambda found: apply_settings(config, found))
    assert _refused(tiny_qwen_image, **two | {"ring_degree": 4}) == (
        ["ring_degree"],
        "--ring-degree is 4, which makes 4 ranks, and there are 2 devices; give it 2 or less",
    )
    assert _refused(tiny_qwen_image, **two, data_parallel_size=2)[0] == ["ring_degree"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    assert "there are 1 devices" in _refused(tiny_qwen_image, **two)[1]
    # a rank checks settings too, and sees its own GPU alone
    monkeypatch.setenv(RENDEZVOUS, "/there")
    open_model(config.model, apply=lambda found: apply_settings(config, found))
