"""Attention by role, step and layer: what is asked for, what it does to a stack, and what stops the start."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from omni_grpc.checkpoint.registry import open_checkpoint
from omni_grpc.compat import OmniDiffusionConfig
from omni_grpc.config import EngineConfig
from omni_grpc.config.backends import AUTO, BACKENDS, ELSEWHERE, Use, canonical, choose
from omni_grpc.config.roles import Choice, Roles, Window, parse
from omni_grpc.config.settings import settings
from omni_grpc.features import Context, Effects, attention
from omni_grpc.nn.attention import Attention, described, in_use, leaves
from omni_grpc.nn.rows import LayoutCache, Row, Rows
from omni_grpc.nn.stack import Block, Stack
from omni_grpc.ops.attention_kernels import Offsets, fp8_emulated, int8
from omni_grpc.resolve.settings import apply_settings
from omni_grpc.types.errors import ConfigError
from omni_grpc.worker.build import build
from tests.ops.attention_cases import EIGHT_BITS, ON_CPU, made_up
from tests.parallel.toys import SPEC

CPU = torch.device("cpu")


def asked(**config: Any) -> Roles:
    return parse(None, config)


# --- what is asked for ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("TORCH_SDPA", "TORCH_SDPA"),
        ("torch_sdpa", "TORCH_SDPA"),
        ("sdpa", "TORCH_SDPA"),
        ("native", "TORCH_SDPA"),
        ("_native_cudnn", "CUDNN_ATTN"),
        ("_flash_3", "FLASH_ATTN_3"),
        ("fa2", "FLASH_ATTN_2"),
        ("flash_attn", "FLASH_ATTN"),
        ("Auto", AUTO),
    ],
)
def test_a_backend_has_the_names_that_users_know(name: str, expected: str) -> None:
    assert canonical(name) == expected


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_others_have_is_refused_with_what_comes_near(name: str) -> None:
    with pytest.raises(ConfigError, match=f"not supported yet; the nearest is {ELSEWHERE[name]}") as refused:
        canonical(name.lower())
    assert refused.value.reason == "NOT_SUPPORTED"
    assert canonical(ELSEWHERE[name]) == ELSEWHERE[name]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"default": "FLASH_ATN"},
            r"--diffusion-attention-config.default.backend is 'FLASH_ATN'.*did you mean FLASH_AT",
        ),
        ({"default": {"backend": 3}}, r"backend is 3: expected one of auto, FLASH_ATTN, FP8_ATTN, INT8_ATTN, TORCH"),
        (
            {"per_role": {"self": {"backend": "TRTLLM_ATTN"}}},
            r"per_role.self.backend is 'TRTLLM_ATTN': not supported yet; the near",
        ),
        ({"per_role": {"self": {"bakend": "SDPA"}}}, r"per_role.self has 'bakend'.*did you mean 'backend'"),
        ({"per_rol": {}}, r"config has 'per_rol'.*did you mean 'per_role'"),
        ({"per_role": ["self"]}, r"per_role is \['self'\]: expected an object"),
        ({"default": {"precision": "int4"}}, r"precision is 'int4': expected auto, bf16, fp16, fp32, fp8 or int8"),
        ({"schedule": [{"steps": [0.1, 0.9], "precision": "q8"}]}, r"schedule\[0\].precision is 'q8': expected auto"),
        ({"schedule": [{"steps": [0.9, 0.1], "precision": "bf16"}]}, r"schedule\[0\].steps is \[0.9, 0.1\]: expected"),
        ({"schedule": [{"layers": [0, 2], "precision": "bf16"}]}, r"schedule\[0\].layers is \[0, 2\]: expected"),
        ({"schedule": [{"steps": [0, 1]}]}, r"schedule\[0\] .* needs a precision"),
        ({"schedule": {"steps": [0, 1]}}, r"expected a list of windows"),
    ],
)
def test_what_cannot_be_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        EngineConfig.from_settings(model="m", diffusion_attention_config=config)
    assert refused.value.violations[0].field.startswith("diffusion_attention_config")
    assert refused.value.reason in ("BAD_CONFIGURATION", "NOT_SUPPORTED", "UNKNOWN_SETTING")


def test_two_defaults_must_agree() -> None:
    assert parse("sdpa", {"default": "TORCH_SDPA"}).default.backend == "TORCH_SDPA"
    with pytest.raises(ConfigError, match=r"--diffusion-attention-backend FLASH_ATTN and .* differ"):
        parse("FLASH_ATTN", {"default": "TORCH_SDPA"})


def test_lookup_is_role_category_default_platform() -> None:
    roles = asked(
        default={"backend": "CUDNN_ATTN", "precision": "fp16"},
        per_role={"a.b": {"backend": "TORCH_SDPA"}, "cross": {"backend": "SAGE_ATTN", "precision": "bf16"}, "x": AUTO},
    )
    found = {role: roles.of(*role) for role in (("a.b", "cross"), ("c", "cross"), ("self", "self"), ("x", "x"))}
    assert [(it.backend, it.precision) for it in found.values()] == [
        ("TORCH_SDPA", "bfloat16"),
        ("SAGE_ATTN", "bfloat16"),
        ("CUDNN_ATTN", "float16"),
        ("CUDNN_ATTN", "float16"),
    ]
    assert found["a.b", "cross"].field == "diffusion_attention_config.per_role.a.b.backend"
    assert Roles().of("self", "self").backend == AUTO


@pytest.mark.parametrize(
    "argv",
    [
        ["--diffusion-attention-config.per_role.self.backend", "SAGE_ATTN"],
        ["--diffusion-attention-config.per_role.self.backend=SAGE_ATTN"],
        ["-dac.per_role.self.backend", "SAGE_ATTN"],
        ["-dac", '{"per_role": {"self": {"backend": "SAGE_ATTN"}}}'],
        ['-dac={"per_role": {"self": "sage"}}'],
    ],
)
def test_flags_write_it_as_paths_or_json(argv: list[str]) -> None:
    config = settings(argv, {}, prog="serve", description="")
    assert config.model.attention is not None
    assert config.model.attention.of("self", "self").backend == "SAGE_ATTN"


def test_paths_add_to_json_and_win(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    roles = "{m: {a2v: {backend: TORCH_SDPA}}, self: {precision: bf16}}"
    file.write_text(f"diffusion_attention_config:\n  per_role: {roles}\n", encoding="utf-8")
    from_file = settings(["--config", str(file)], {}, prog="serve", description="").model.attention
    assert from_file is not None
    assert from_file.per_role.keys() == {"m.a2v", "self"}
    argv = ["-dac", '{"default": "sdpa", "schedule": []}', "-dac.default.backend", "FA3", "-dac.default.precision=bf16"]
    flags = settings([*argv, "--config", str(file)], {}, prog="serve", description="").model.attention
    assert flags == asked(default={"backend": "FA3", "precision": "bf16"})
    with pytest.raises(ConfigError, match=r"default\.backend needs a value"):
        settings(["-dac.default.backend"], {}, prog="serve", description="")
    with pytest.raises(ConfigError, match=r"unknown argument '--max-queue\.x'"):
        settings(["--max-queue.x", "1"], {}, prog="serve", description="")


# --- what it does -----------------------------------------------------------------------------------------------------


class Layer(Block):
    """Attention within a stream and across to another, each of which adds to what comes."""

    carry = ("img",)

    def __init__(self) -> None:
        super().__init__()
        self.within = Attention(2, 8)
        self.across = Attention(2, 8, role="m.text", role_category="cross")

    def modulation(self, temb: Tensor) -> Tensor:
        return temb

    def forward(self, *carry: Tensor, rows: Rows, mod: Tensor, **constants: Tensor) -> tuple[Tensor, ...]:
        (x,) = (each.unflatten(1, (2, 8)) for each in carry)
        out = self.within(x, x, x, rows, over="img")
        return (
            (out + self.across(x, rows["keys"], rows["keys"], rows, over="img", kv="txt")).flatten(1).split(x.shape[0])
        )


def stack(layers: int = 4) -> Stack:
    return Stack(layers=[Layer() for _ in range(layers)])


def batch(*at: tuple[int, int]) -> tuple[dict[str, Tensor], Rows]:
    """Rows whose requests are at step i of n."""
    owners = [(SimpleNamespace(index=index, schedule=SimpleNamespace(steps=steps)), "cond") for index, steps in at]
    layouts = [Row.of(aside=("txt",), img=5 + row, txt=3) for row in range(len(at))]
    rows = Rows(owners, layouts, LayoutCache("cpu"))
    generator = torch.Generator().manual_seed(1)
    rows.bound["keys"] = ("txt", torch.randn(rows.stream("txt").total, 2, 8, generator=generator))
    rows.bound["layers"] = ("mod", torch.zeros(len(at), 1, 1))
    return {"img": torch.randn(rows.stream("img").total, 16, generator=generator)}, rows


def apply(module: Stack, roles: Roles, dtype: torch.dtype = torch.float32) -> Effects:
    context = Context(component="transformer", spec=SPEC, device=CPU, dtype=dtype)
    attention.apply(module, roles, context)
    context.effects.check()
    return context.effects


def test_a_role_gets_its_backend_and_no_other_does() -> None:
    carry, rows = batch((0, 1), (0, 1))
    with made_up():
        for per_role, roles in ({"self": "MADE_UP"}, {"within"}), ({"cross": "MADE_UP"}, {"across"}):
            module = stack(1)
            effects = apply(module, asked(per_role=per_role))
            layer = module.group("layers")[0]
            assert {name for name in ("within", "across") if getattr(layer, name).backend == "MADE_UP"} == roles
            plain = stack(1).group("layers")[0]
            x = carry["img"].unflatten(1, (2, 8))
            for name, kv, keys in (("within", None, x), ("across", "txt", rows["keys"])):
                mine, theirs = (getattr(it, name)(x, keys, keys, rows, over="img", kv=kv) for it in (layer, plain))
                torch.testing.assert_close(mine, 2 * theirs if name in roles else theirs)
            other = "m.text" if roles == {"within"} else "self"
            mine = "self" if other == "m.text" else "m.text"
            expected = ", ".join(sorted((f"{mine}: MADE_UP", f"{other}: {ON_CPU}")))
            assert described(effects.slots["attention"]) == expected


def test_what_auto_picked_is_said() -> None:
    assert described(in_use(stack(), CPU, torch.float32)) == ON_CPU
    assert described(apply(stack(), asked(default={"precision": "bf16"})).slots["attention"]) == f"{ON_CPU} in bfloat16"
    assert described(apply(stack(), Roles()).slots["attention"]) == ON_CPU


def test_a_role_that_no_attention_has_is_refused_with_those_there_are() -> None:
    for role in ("self", "cross", "m.text"):
        apply(stack(), asked(per_role={role: "TORCH_SDPA"}))
    with pytest.raises(
        ConfigError, match=r"per_role.slef: .* its roles: cross, m.text, self; did you mean 'self'"
    ) as error:
        apply(stack(), asked(per_role={"slef": "TORCH_SDPA"}))
    assert error.value.reason == "UNKNOWN_ROLE"


def test_a_backend_that_cannot_run_stops_the_start_by_the_setting_that_named_it() -> None:
    with pytest.raises(
        ConfigError, match=r"per_role.cross.backend FLASH_ATTN is not available here.*FLASH_ATTN_2 runs on"
    ):
        apply(stack(), asked(per_role={"cross": "FLASH_ATTN"}))
    with pytest.raises(ConfigError, match="--diffusion-attention-backend CUDNN_ATTN is not available here"):
        apply(stack(), parse("CUDNN_ATTN", None))
    broken = dataclasses.replace(BACKENDS["TORCH_SDPA"], run="tests.features.test_attention:fails")
    with mock.patch.dict(BACKENDS, {"BROKEN": broken}):  # type: ignore[arg-type]  # a dict underneath
        with pytest.raises(ConfigError, match="BROKEN does not run here: no kernel for this; use another") as error:
            apply(stack(), asked(per_role={"cross": "BROKEN"}))
        assert error.value.reason == "ATTENTION_UNAVAILABLE"
        assert error.value.violations[0].field == "diffusion_attention_config.per_role.cross.backend"


def fails(*_: object) -> Tensor:
    raise RuntimeError("no kernel for this")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.dtype, int]]:
    """The precision and the tokens of every attention that is computed, cross attention left out."""
    seen: list[tuple[torch.dtype, int]] = []
    compute = attention.Attention.forward

    def spy(
        self: Attention, q: Tensor, k: Tensor, v: Tensor, rows: Rows, over: str = "joint", kv: Any = None
    ) -> Tensor:
        if kv is None:
            seen.append((q.dtype, q.shape[0]))
        return compute(self, q, k, v, rows, over, kv)

    monkeypatch.setattr(attention.Attention, "forward", spy)
    return seen


F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


def test_the_first_and_last_steps_and_layers_have_a_precision_of_their_own(seen: list[Any]) -> None:
    """The first window that covers a step and a layer counts: of 10 steps and 10 layers, those from 1 to 8."""
    module = stack(10)
    apply(module, asked(schedule=[{"steps": [0.1, 0.9], "layers": [0.1, 0.9], "precision": "bf16"}]))
    for step in range(10):
        seen.clear()
        carry, rows = batch((step, 10))
        out = module(carry, rows)["img"]
        assert out.dtype == F32
        inside = [0 < step < 9 and 0 < layer < 9 for layer in range(10)]
        assert [dtype for dtype, _ in seen] == [BF16 if it else F32 for it in inside]


def test_rows_at_unlike_steps_are_computed_apart_and_come_back_in_order(seen: list[Any]) -> None:
    """In float64 in the first half of the steps: as close as float32 is to it, row by row."""
    carry, rows = batch((0, 4), (3, 4), (1, 4), (2, 4), (0, 1))
    plain = stack(1)(carry, rows)["img"]
    seen.clear()
    module = stack(1)
    apply(module, Roles(schedule=(Window(precision="float64", steps=(0.0, 0.5)),)))
    out = module(carry, rows)["img"]
    assert sorted(seen, key=str) == [(F32, 6 + 8), (F64, 5 + 7 + 9)]
    torch.testing.assert_close(out, plain, atol=1e-5, rtol=1e-5)
    late = rows.stream("img").take(plain, [1, 3])
    assert torch.equal(rows.stream("img").take(out, [1, 3]), late)
    assert not torch.equal(rows.stream("img").take(out, [0, 2, 4]), rows.stream("img").take(plain, [0, 2, 4]))


def test_a_precision_is_for_its_role(seen: list[Any]) -> None:
    module = stack(1)
    effects = apply(module, asked(per_role={"self": {"precision": "bf16"}}))
    assert described(effects.slots["attention"]) == f"m.text: {ON_CPU}, self: {ON_CPU} in bfloat16"
    carry, rows = batch((0, 1))
    module(carry, rows)
    assert seen == [(BF16, 5)]
    assert isinstance(module.group("layers")[0].across, Attention)
    assert not isinstance(module.group("layers")[0].across, attention.PreciseAttention)


@pytest.mark.parametrize(
    ("precision", "backend", "written_out"),
    [("fp8", "FP8_EMULATION", fp8_emulated), ("int8", "INT8_EMULATION", int8)],
)
def test_8_bits_are_what_their_kernel_computes_in_their_steps_and_layers_alone(
    precision: str, backend: str, written_out: Any
) -> None:
    """Here written out for a CPU; codes have a scale for each row and head, so no row sees another."""
    carry, rows = batch((2, 4), (0, 4))
    plain, module = stack(2)(carry, rows)["img"], stack(2)
    effects = apply(module, asked(schedule=[{"steps": [0.5, 1], "precision": precision}]))
    assert described(effects.slots["attention"]) == f"{ON_CPU} + {backend}"
    assert described(in_use(module, CPU, F32)) == f"{ON_CPU} + {backend}"
    out = module(carry, rows)["img"]
    first, second = (rows.stream("img").take(x, [0]) for x in (out, plain))
    off = ((first - second).norm() / second.norm()).item()
    assert 1e-3 < off < EIGHT_BITS
    assert torch.equal(rows.stream("img").take(out, [1]), rows.stream("img").take(plain, [1]))
    x = carry["img"].unflatten(1, (2, 8))
    host = rows.stream("img").host
    at = Offsets(cu_q=host, cu_k=host, longest_q=6, longest_k=6)
    want = written_out(x, x, x, at, 8**-0.5, False)
    every = stack(1)
    apply(every, asked(default={"precision": precision}))
    assert torch.equal(every.group("layers")[0].within(x, x, x, rows, over="img"), want)


def test_fp8_is_had_from_what_has_it_and_refused_elsewhere() -> None:
    apply(stack(1), asked(default={"precision": "fp8_e4m3"}, per_role={"self": "FP8_EMULATION"}))
    with pytest.raises(
        ConfigError, match="TORCH_SDPA does not support fp8 yet; use auto, FLASH_ATTN, FLASH_ATTN_3"
    ) as no:
        apply(stack(1), asked(default={"precision": "fp8", "backend": "sdpa"}))
    assert no.value.reason == "NOT_SUPPORTED"
    with pytest.raises(ConfigError, match="FLASH_ATTN_3_FP8 is not available here: FLASH_ATTN_3_FP8 runs on cuda, not"):
        apply(stack(1), asked(default={"precision": "fp8", "backend": "FA3"}))
    older = Use(device="cuda", capability=(8, 9), dtype="bfloat16", head_size=128)
    lacks = r"FLASH_ATTN_3_FP8 needs compute capability 9.0, but this device has 8.9; FP8_EMUL"
    with pytest.raises(ConfigError, match=lacks):
        choose("FP8_ATTN", older)


def test_int8_is_had_from_what_has_it_and_refused_elsewhere() -> None:
    apply(stack(1), asked(default={"precision": "int8"}, per_role={"self": "INT8_ATTN"}))
    with pytest.raises(ConfigError, match="FLASH_ATTN_3 does not support int8 yet; use auto") as no:
        apply(stack(1), asked(default={"precision": "int8", "backend": "FA3"}))
    assert no.value.reason == "NOT_SUPPORTED"
    with pytest.raises(ConfigError, match="OMNI_INT8 is not available here: OMNI_INT8 runs on cuda, not on cpu"):
        apply(stack(1), asked(default="OMNI_INT8"))
    hopper = {"device": "cuda", "capability": (9, 0), "dtype": "bfloat16", "head_size": 128}
    hopper["kernels"] = frozenset({"attention_q"})
    assert choose("INT8_ATTN", Use(**hopper)) == "OMNI_INT8"
    for why, change in {
        "needs compute capability 9.0, but this device has 10.0": {"capability": (10, 0)},
        "multiples of 128 up to 128, not 64": {"head_size": 64},
        "does not support causal attention": {"causal": True},
        r"needs an op library that contains its kernel \(build .* with nvcc, for 90a\)": {"kernels": frozenset()},
    }.items():
        with pytest.raises(ConfigError, match=f"OMNI_INT8 .*{why}; INT8_EMULATION runs on cpu"):
            choose("INT8_ATTN", Use(**{**hopper, **change}))


def test_rows_that_are_to_be_alike_in_any_batch_get_a_form_that_is() -> None:
    """Whatever else was asked, or nothing."""
    coded = [asked(per_role={"self": {"precision": each}, "cross": "TORCH_SDPA"}) for each in ("fp8", "int8")]
    for roles in (Roles(), *coded):
        module = stack(1)
        context = Context(component="transformer", spec=SPEC, device=CPU, dtype=F32, batch_invariant=True)
        attention.apply(module, roles, context)
        named = {part.backend for _, part in leaves(module)}
        assert named <= {"auto invariant", "TORCH_SDPA invariant", "FP8_ATTN invariant", "INT8_ATTN invariant"}
        carry, rows = batch((0, 1), (0, 1))
        out = module(carry, rows)["img"]
        for row in (0, 1):
            single = module({"img": rows.stream("img").take(carry["img"], [row])}, rows.narrow([row]))["img"]
            assert torch.equal(rows.stream("img").take(out, [row]), single)


def load(folder: Path, **asked: Any) -> str:
    """What a worker says that it runs on."""
    config = EngineConfig.from_settings(model=str(folder), device="cpu", warm_up_seconds=0.1, **asked)
    checkpoint = apply_settings(config, open_checkpoint(folder))
    return build(config, checkpoint, "omni-test-", lambda loading: None)[-1].found.attention_backend


def test_a_worker_says_what_it_runs_on_and_does_not_start_on_what_is_not_there(tiny_qwen_image: Path) -> None:
    assert load(tiny_qwen_image) == load(tiny_qwen_image, diffusion_attention_backend="auto") == ON_CPU
    assert load(tiny_qwen_image, diffusion_attention_backend="native") == "TORCH_SDPA"
    inner = {"schedule": [{"steps": [0.1, 0.9], "precision": "bf16"}]}
    assert load(tiny_qwen_image, diffusion_attention_config=inner) == f"{ON_CPU} + {ON_CPU} in bfloat16"
    with pytest.raises(ConfigError, match=r"per_role.cross: the model has no such role; its roles: joint, self"):
        load(tiny_qwen_image, diffusion_attention_config={"per_role": {"cross": "TORCH_SDPA"}})
    assert load(tiny_qwen_image, diffusion_attention_config={"default": {"precision": "fp8"}}) == "FP8_EMULATION"
    assert load(tiny_qwen_image, diffusion_attention_config={"default": {"precision": "int8"}}) == "INT8_EMULATION"
    assert load(tiny_qwen_image, batch_invariant=True) == ON_CPU
    with pytest.raises(ConfigError, match="FLASH_ATTN_3 runs on cuda, not on cpu; FLASH_ATTN_2 runs on cuda"):
        load(tiny_qwen_image, diffusion_attention_backend="FLASH_ATTN")


def test_the_python_names_of_vllm_omni_take_it() -> None:
    given = {"per_role": {"self": {"backend": "TORCH_SDPA"}}}
    config = OmniDiffusionConfig(model="m", diffusion_attention_config=given)
    made = EngineConfig.from_settings(**config.settings()).model.attention
    assert made is not None
    assert made.per_role["self"].backend == "TORCH_SDPA"


def test_choices_have_no_effect_where_nothing_is_asked() -> None:
    config = EngineConfig.from_settings(model="m")
    assert config.model.attention is None
    given: Mapping[str, Any] = {"diffusion_attention_backend": "auto"}
    assert EngineConfig.from_settings(model="m", **given).model.attention == Roles(default=Choice())
