"""The attention family: every backend of the table on this device, and what the table says of those that cannot run."""

from __future__ import annotations

import contextlib
import sys
import types

import pytest
import torch

from omni_grpc.backends import AUTO, BACKENDS, FAMILIES, Use, choose, lack
from omni_grpc.errors import ConfigError
from omni_grpc.ops import attention_kernels
from omni_grpc.ops.attention_kernels import Offsets, sdpa
from omni_grpc.spec import imported
from tests.ops.attention_cases import SCALE, Case, expected, inputs

H100 = {"device": "cuda", "capability": (9, 0), "dtype": "bfloat16", "head_size": 128}


def test_the_op_is_what_its_schema_and_its_fake_say(seed: int) -> None:
    x = inputs(Case(lengths="unlike rows", dtype=torch.float32), "cpu", seed)
    torch.library.opcheck(
        torch.ops.omni_grpc.varlen_attention.default,
        (x.q, x.k, x.v, x.host_q, x.host_k, 300, 300, 0.3, False, "TORCH_SDPA", x.host_q.clone(), x.host_k.clone()),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("FLASH_ATTN_3", {"capability": (8, 6)}, "needs compute capability 9.0, and this is 8.6"),
        ("FLASH_ATTN_2", {"capability": (7, 5)}, "needs compute capability 8.0 to 12.1, and this is 7.5"),
        ("FLASH_ATTN_3", {"dtype": "float16"}, "needs bfloat16, and this is float16"),
        ("CUDNN_ATTN", {"dtype": "float32"}, "needs bfloat16 or float16, and this is float32"),
        ("CUDNN_ATTN", {"head_size": 256}, "multiples of 8 up to 128, and this is 256"),
        ("FLASH_ATTN_2", {"head_size": 36}, "multiples of 8 up to 256, and this is 36"),
        ("SAGE_ATTN", {"causal": True}, "does no causal attention"),
        ("SAGE_ATTN", {}, r"needs the package sageattention \(pip install sageattention\)"),
        (
            "FLASH_ATTN",
            {"device": "cpu", "capability": None},
            "FLASH_ATTN_3 runs on cuda, and this is cpu; FLASH_ATTN_2",
        ),
    ],
)
def test_what_a_backend_lacks_is_said(name: str, change: dict, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=why) as refused:
        choose(name, Use(**{**H100, **change}))
    assert refused.value.reason == "ATTENTION_UNAVAILABLE"
    assert refused.value.violations[0].field == "diffusion_attention_backend"


def test_auto_is_the_first_of_the_platform_that_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    there: set[str] = set()
    monkeypatch.setattr("importlib.util.find_spec", lambda package: True if package in there else None)
    cpu = {"device": "cpu", "capability": None, "dtype": "float32"}
    assert choose(AUTO, Use(**{**H100, **cpu})) == "TORCH_SDPA"
    assert choose(AUTO, Use(**H100)) == choose("FLASH_ATTN", Use(**H100)) == "FLASH_ATTN_2"
    assert choose(AUTO, Use(**{**H100, "dtype": "float32"})) == "TORCH_SDPA"
    there.add("fa3_fwd_interface")
    assert choose(AUTO, Use(**H100)) == choose("FLASH_ATTN", Use(**H100)) == "FLASH_ATTN_3"
    assert choose(AUTO, Use(**{**H100, "capability": (8, 0)})) == "FLASH_ATTN_2"
    assert choose(AUTO, Use(**{**H100, "device": "mps", "capability": None})) == "TORCH_SDPA"


STAND_INS: dict[str, tuple[str, str]] = {
    "flash_3": ("fa3_fwd_interface", "flash_attn_varlen_func"),
    "sage": ("sageattention", "sageattn"),
}
"""Functions of backends, with the package and the function that they call."""


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", STAND_INS)
def test_a_package_is_called_as_it_wants_to_be(
    name: str, causal: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function of the package's own signature, which computes on the CPU, stands in for it."""

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False
    ):
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        assert (max_seqlen_q, max_seqlen_k) == (64, 130)
        at = Offsets(cu_q=cu_seqlens_q, cu_k=cu_seqlens_k, longest_q=max_seqlen_q, longest_k=max_seqlen_k)
        return sdpa(q, k, v, at, softmax_scale, causal)

    def sageattn(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None):
        assert tensor_layout == "HND"
        assert k.shape[2] > 0, "rows without keys never get there"
        n, m = q.shape[2], k.shape[2]
        mask = torch.ones(n, m, dtype=torch.bool).tril(m - n) if is_causal else None
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=sm_scale).nan_to_num()

    package, function = STAND_INS[name]
    stand_in = types.ModuleType(package)
    setattr(stand_in, function, {"flash_3": flash_attn_varlen_func, "sage": sageattn}[name])
    monkeypatch.setitem(sys.modules, package, stand_in)
    x = inputs(Case(lengths="across", dtype=torch.float32), "cpu", seed)
    run = imported(f"omni_grpc.ops.attention_kernels:{name}")
    at = Offsets(cu_q=x.host_q, cu_k=x.host_k, longest_q=64, longest_k=130)
    torch.testing.assert_close(
        run(x.q, x.k, x.v, at, SCALE, causal).double(), expected(x, causal), atol=2e-5, rtol=2e-5
    )


@pytest.mark.parametrize("causal", [False, True])
def test_runs_of_like_rows_are_right_where_cudnn_refuses(causal: bool, seed: int, monkeypatch) -> None:
    """A single key, and grouped queries, are written out around it; here torch's own stands in for it."""
    monkeypatch.setattr(attention_kernels, "sdpa_kernel", lambda backend: contextlib.nullcontext())
    for case in (Case(lengths="across", dtype=torch.float32, heads=6, kv_heads=2), Case(dtype=torch.float32)):
        x = inputs(case, "cpu", seed)
        at = Offsets(cu_q=x.host_q, cu_k=x.host_k, longest_q=300, longest_k=300)
        out = attention_kernels.cudnn(x.q, x.k, x.v, at, SCALE, causal).double()
        torch.testing.assert_close(out, expected(x, causal), atol=2e-5, rtol=2e-5)


def test_every_row_of_the_table_has_a_function_and_runs_somewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda package: True)
    for name, backend in BACKENDS.items():
        for path in filter(None, (backend.run, backend.apart)):
            assert callable(imported(path)), name
        on = {} if "cuda" in (backend.devices or ("cuda",)) else {"device": "cpu", "capability": None}
        assert lack(backend, Use(**{**H100, **on})) == "", name
    assert {name for names in FAMILIES.values() for name in names} <= set(BACKENDS)
