"""The attention family: every backend of the table on this device, and what the table says of those that cannot run."""

from __future__ import annotations

import pkgutil
import sys
import types
from typing import cast
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from omni_grpc.config.backends import AUTO, BACKENDS, FAMILIES, Use, choose, kernel_for, kernels_of, lack
from omni_grpc.ops import attention_choice, attention_kernels
from omni_grpc.ops.attention_choice import RowSizes
from omni_grpc.ops.attention_kernels import Offsets, quantized_reference, sdpa
from omni_grpc.ops.heads import QuantizedHeads
from omni_grpc.ops.tuning import Choices
from omni_grpc.types.errors import ConfigError
from tests.ops.attention_cases import EIGHT_BITS, SCALE, Case, expected, inputs

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
        ("FLASH_ATTN_3", {"capability": (8, 6)}, "needs compute capability 9.0, but this device has 8.6"),
        ("FLASH_ATTN_2", {"capability": (7, 5)}, "needs compute capability 8.0 to 12.1, but this device has 7.5"),
        ("FLASH_ATTN_3", {"dtype": "float16"}, "needs bfloat16, not float16"),
        ("CUDNN_ATTN", {"dtype": "float32"}, "needs bfloat16 or float16, not float32"),
        ("CUDNN_ATTN", {"head_size": 256}, "multiples of 8 up to 128, not 256"),
        ("FLASH_ATTN_2", {"head_size": 36}, "multiples of 8 up to 256, not 36"),
        ("SAGE_ATTN", {"causal": True}, "does not support causal attention"),
        ("SAGE_ATTN", {"head_size": 32}, "multiples of 32 from 64 up to 128, not 32"),
        ("SAGE_ATTN", {}, r"needs the package sageattention \(from source"),
        (
            "FLASH_ATTN",
            {"device": "cpu", "capability": None},
            "FLASH_ATTN_3 runs on cuda, not on cpu; FLASH_ATTN_2",
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
    cpu["kernels"] = frozenset({"attention_cpu"})
    assert choose(AUTO, Use(**{**H100, **cpu})) == "OMNI_CPU"
    assert choose(AUTO, Use(**{**H100, **cpu, "dtype": "float64"})) == "TORCH_SDPA"
    with pytest.raises(ConfigError, match=r"OMNI_CPU needs an op library that contains its kernel \(build .* C\+\+"):
        choose("OMNI_CPU", Use(**{**H100, **cpu, "kernels": frozenset()}))
    assert choose(AUTO, Use(**H100)) == choose("FLASH_ATTN", Use(**H100)) == "FLASH_ATTN_2"
    assert choose(AUTO, Use(**{**H100, "dtype": "float32"})) == "TORCH_SDPA"
    there.add("fa3_fwd_interface")
    assert choose(AUTO, Use(**H100)) == choose("FLASH_ATTN", Use(**H100)) == "FLASH_ATTN_3"
    assert choose(AUTO, Use(**{**H100, "capability": (8, 0)})) == "FLASH_ATTN_2"
    assert choose(AUTO, Use(**{**H100, "device": "mps", "capability": None})) == "TORCH_SDPA"


def test_what_auto_leaves_open_is_the_fastest_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    there: set[str] = set()
    monkeypatch.setattr("importlib.util.find_spec", lambda package: True if package in there else None)
    assert kernels_of(AUTO, Use(**H100)) == ("FLASH_ATTN_2", "CUDNN_ATTN")
    assert kernels_of(AUTO, Use(**{**H100, "dtype": "float32"})) == ("TORCH_SDPA",)
    there.add("fa3_fwd_interface")
    both = ("FLASH_ATTN_3 together", "FLASH_ATTN_3 apart")
    # a plan for each new shape is worth it where nothing is as fast without
    assert kernels_of(AUTO, Use(**H100)) == both
    assert kernels_of("FLASH_ATTN", Use(**H100)) == kernels_of("FLASH_ATTN_3", Use(**H100)) == both
    assert kernels_of("FLASH_ATTN_3 apart", Use(**H100)) == ("FLASH_ATTN_3 apart",)
    assert kernels_of("auto invariant", Use(**H100)) == ("FLASH_ATTN_3 invariant",)
    assert [kernel_for(kernel).partition(":")[2] for kernel in both] == ["flash_3", "flash_3_apart"]
    assert kernel_for("FLASH_ATTN_3 invariant").endswith(":flash_3_apart")
    assert kernel_for("FLASH_ATTN_2 invariant").endswith(":flash_2")
    assert kernel_for("FLASH_ATTN_3_FP8 together", quantized=True).endswith(":flash_3_quantized")
    assert kernel_for("FLASH_ATTN_3_FP8 apart", quantized=True).endswith(":flash_3_quantized_apart")
    assert kernel_for("FP8_EMULATION", quantized=True).endswith(":quantized_reference")
    with pytest.raises(ConfigError, match="FLASH_ATTN_3 runs on cuda, not on cpu"):
        kernels_of("FLASH_ATTN_3 apart", Use(**{**H100, "device": "cpu", "capability": None}))


def on_a_gpu(heads: int = 24, size: int = 128) -> torch.Tensor:
    """As much of a tensor as a choice looks at."""
    there = types.SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.bfloat16, shape=(0, heads, size))
    return cast(torch.Tensor, there)


def test_times_decide_row_by_row_and_size_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    start = "attention bfloat16 24x24x128 full"
    known = Choices(
        {
            f"{start} one self": {1500: {"A": 2.0, "B": 1.0}, 9000: {"A": 1.0, "B": 2.0}},
            f"{start} unlike4 self": {1500: {"A": 1.0, "B apart": 0.5}},
            f"{start} unlike16 self": {1500: {"A": 1.0, "B apart": 0.5}},
            f"{start} one keys512": {32000: {"A": 3.0, "B": 2.0}},
        }
    )
    monkeypatch.setattr(attention_choice, "choices", lambda device: known)

    def taken(rows: RowSizes, *ways: str, causal: bool = False) -> str:
        return attention_choice.fastest(ways or ("A", "B"), rows, on_a_gpu(), 24, causal)

    assert taken(RowSizes(1, True, 1536, 1536)) == "B"
    assert taken(RowSizes(1, True, 9216, 9216)) == "A"
    assert taken(RowSizes(1, True, 32760, 700)) == "B"
    # no times: the first
    assert taken(RowSizes(1, True, 1536, 1536), causal=True) == "A"
    assert taken(RowSizes(2, True, 1536, 1536)) == "A"
    assert taken(RowSizes(5, False, 1536, 1536), "A", "B apart") == "B apart"
    forms = ("FLASH_ATTN_3 together", "FLASH_ATTN_3 apart")
    assert taken(RowSizes(3, True, 20000, 20000), *forms) == forms[1]
    assert taken(RowSizes(3, False, 20000, 20000), *forms) == forms[0]
    # the host would not keep up with one call for each of so many rows
    assert taken(RowSizes(17, False, 1536, 1536), "A", "B apart") == "A"
    # what was chosen is there for metrics; where there is one alone, nothing was
    assert known.used == {("attention", kernel) for kernel in ("A", "B", "B apart", *forms)}
    there = torch.device("cuda", 0)
    assert attention_choice.taken(("A", "B", "B apart"), there, "bfloat16", "24x24x128", False) == ["A", "B"]
    assert attention_choice.taken(("C", "A"), there, "bfloat16", "40x40x128", False) == ["C"]


@pytest.mark.parametrize(
    ("rows", "tokens", "keys"),
    [
        (RowSizes(1, True, 50, 50), [50], [50]),
        (RowSizes(3, True, 50, 50), [50, 50], [50, 50]),
        (RowSizes(5, False, 50, 50), [30, 43, 57, 70], [30, 43, 57, 70]),
        (RowSizes(2, False, 50, 20), [30, 70], [10, 22]),
        (RowSizes(2, False, 0, 0), [1, 1], [1, 1]),
    ],
)
def test_a_shape_is_measured_on_rows_like_it(rows: RowSizes, tokens: list[int], keys: list[int]) -> None:
    shape = attention_choice.shape_of(rows, "float32", 4, 2, 8, False)
    made: dict[str, object] = {}

    def spy(q, k, v, offsets, scale, causal):
        made.update(lengths=offsets.lengths(), q=q.shape, k=k.shape, scale=scale, causal=causal)
        return sdpa(q, k, v, offsets, scale, causal)

    with mock.patch.object(attention_kernels, "sdpa", spy):
        attention_choice.function.cache_clear()
        calls = attention_choice.operands(shape, torch.device("cpu"), ("TORCH_SDPA",))
        calls["TORCH_SDPA"]()
    attention_choice.function.cache_clear()
    assert made["lengths"] == list(zip(tokens, keys, strict=True))
    assert made["q"] == (sum(tokens), 4, 8)
    assert made["k"] == (sum(keys), 2, 8)
    assert (made["scale"], made["causal"]) == (8**-0.5, False)


def test_what_takes_long_is_not_measured_at_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Choices({})
    monkeypatch.setattr(attention_choice, "choices", lambda device: known)
    with known.recorded() as wanted:
        for tokens in (1536, 75600):
            attention_choice.fastest(("A", "B"), RowSizes(1, True, tokens, tokens), on_a_gpu(), 24, False)
    assert [shape.size for shape in wanted] == [1536]


STAND_INS = ("flash_3", "flash_3_apart", "flash_3_fp8", "flash_3_fp8_apart", "sage")


def flash_3_op(
    q, k, v, *, softmax_scale, is_causal, num_splits, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None,
    max_seqlen_k=None, q_descale=None, k_descale=None, v_descale=None, out=None,
):  # fmt: skip
    """What the op of fa3-fwd takes of its own signature, and gives, computed on the CPU."""
    assert num_splits == 1
    if cu_seqlens_q is not None:
        assert out is None
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        assert (max_seqlen_q, max_seqlen_k) == (64, 130)
        assert q_descale is None or q_descale.shape == (len(cu_seqlens_q) - 1, k.shape[1])
        at = Offsets(cu_q=cu_seqlens_q, cu_k=cu_seqlens_k, longest_q=max_seqlen_q, longest_k=max_seqlen_k)
        packed = q, k, v
    else:
        assert k.shape[1] > 0, "rows without keys never get there"
        offsets = (torch.arange(x.shape[0] + 1, dtype=torch.int32) * x.shape[1] for x in (q, k))
        at = Offsets(**dict(zip(("cu_q", "cu_k"), offsets, strict=True)), longest_q=q.shape[1], longest_k=k.shape[1])
        packed = tuple(x.flatten(0, 1) for x in (q, k, v))
    if q.dtype == torch.float8_e4m3fn:
        scales = torch.stack([q_descale, k_descale, v_descale])
        made = quantized_reference(QuantizedHeads(*packed, scales), at, softmax_scale, is_causal).bfloat16()
    else:
        made = sdpa(*packed, at, softmax_scale, is_causal)
    made = made.view(q.shape)
    return made if out is None else out.copy_(made), None, None, None


def sageattn(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None):
    assert tensor_layout == "HND"
    assert k.shape[2] > 0, "rows without keys never get there"
    n, m = q.shape[2], k.shape[2]
    mask = torch.ones(n, m, dtype=torch.bool).tril(m - n) if is_causal else None
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=sm_scale)
    out[:, :, : n - m if is_causal and n > m else 0] = 0  # they see no key
    return out


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", STAND_INS)
def test_a_package_is_called_as_it_wants_to_be(
    name: str, causal: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function of the package's own signature, which computes on the CPU, stands in for it."""
    fa3, sage = types.ModuleType("fa3_fwd_interface"), types.ModuleType("sageattention")
    fa3.fa3_fwd_cuda = types.SimpleNamespace(fwd=types.SimpleNamespace(default=flash_3_op))  # type: ignore[attr-defined]
    sage.sageattn = sageattn  # type: ignore[attr-defined]
    for module in (fa3, sage):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    x = inputs(Case(lengths="across", dtype=torch.float32), "cpu", seed)
    run = pkgutil.resolve_name(f"omni_grpc.ops.attention_kernels:{name}")
    at = Offsets(cu_q=x.host_q, cu_k=x.host_k, longest_q=64, longest_k=130)
    out, want = run(x.q, x.k, x.v, at, SCALE, causal).double(), expected(x, causal)
    if "fp8" in name:
        assert 1e-3 < (out - want).norm() / want.norm() < EIGHT_BITS
    else:
        torch.testing.assert_close(out, want, atol=2e-5, rtol=2e-5)


def test_a_version_that_is_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda package: True)
    for version, fine in (("1.0.6", False), ("2.1.0", False), ("2.1.1", True), ("2.2.0+cu130", True)):
        monkeypatch.setattr("importlib.metadata.version", lambda package, version=version: version)
        why = lack(BACKENDS["SAGE_ATTN"], Use(**H100))
        told = f"needs sageattention 2.1.1, but {version} is installed (from source"
        assert why == "" if fine else why.startswith(told)


@pytest.mark.parametrize("causal", [False, True])
def test_runs_of_like_rows_are_right_where_cudnn_refuses(causal: bool, seed: int, monkeypatch) -> None:
    """A single key, and grouped queries, are written out around it; here torch's own stands in for it."""

    def stand_in(q, k, v, bias, compute_log_sumexp, dropout, is_causal, debug, *, scale):
        return (F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=is_causal, scale=scale),)

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", stand_in)
    for case in (Case(lengths="across", dtype=torch.float32, heads=6, kv_heads=2), Case(dtype=torch.float32)):
        x = inputs(case, "cpu", seed)
        at = Offsets(cu_q=x.host_q, cu_k=x.host_k, longest_q=300, longest_k=300)
        out = attention_kernels.cudnn(x.q, x.k, x.v, at, SCALE, causal).double()
        torch.testing.assert_close(out, expected(x, causal), atol=2e-5, rtol=2e-5)


def test_every_row_of_the_table_has_a_function_and_runs_somewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda package: True)
    monkeypatch.setattr("importlib.metadata.version", lambda package: "9.9.9")
    for name, backend in BACKENDS.items():
        for path in filter(None, (backend.run, backend.apart, backend.quantized, backend.quantized_apart)):
            assert callable(pkgutil.resolve_name(path)), name
        on = {} if "cuda" in (backend.devices or ("cuda",)) else {"device": "cpu", "capability": None}
        assert lack(backend, Use(**{**H100, **on, "kernels": frozenset({backend.kernel})})) == "", name
    assert {name for names in FAMILIES.values() for name in names} <= set(BACKENDS)
