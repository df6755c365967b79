"""Attention backends: what is tried, in which order, and what is said when none is there."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

from omni_grpc.adapter.backends import ATTEMPTS, _offer_flash_3
from omni_grpc.config.backends import AUTO, EIGHT_BIT, names
from omni_grpc.types.errors import ConfigError

from .conftest import equal

SMALL = {"width": 64, "height": 64, "steps": 2, "seeds": (1,)}


@pytest.fixture
def register(monkeypatch):
    """Puts a backend of the test's own in place of one of the library's, as if its package were there."""

    def register(name, function):
        backend = AttentionBackendName(name)
        monkeypatch.setitem(_AttentionBackendRegistry._backends, backend, function)
        arguments = {"query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"}
        monkeypatch.setitem(_AttentionBackendRegistry._supported_arg_names, backend, arguments)
        check = attention_dispatch._check_attention_backend_requirements
        monkeypatch.setattr(
            attention_dispatch,
            "_check_attention_backend_requirements",
            lambda asked: None if asked is backend else check(asked),
        )

    return register


def test_the_first_backend_that_works_is_taken(register, load):
    calls = []

    def mine(query, key, value, **kwargs):
        calls.append(query.shape)
        kwargs.pop("enable_gqa", None)
        return torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (query, key, value)), **kwargs
        ).transpose(1, 2)

    own = load("flux").run(**SMALL)
    register("_flash_3", mine)
    before = _AttentionBackendRegistry.get_active_backend()[0]
    adapter = load("flux", diffusion_attention_backend="FLASH_ATTN")
    assert adapter.loaded.found.attention_backend == "_flash_3"
    assert adapter.loaded.warnings == ()
    calls.clear()
    ran = adapter.run(**SMALL)
    assert len(calls) == 2 * 4  # steps x blocks
    assert abs(ran.output - own.output).max() < 1e-5
    # the choice is this model's alone
    assert _AttentionBackendRegistry.get_active_backend()[0] is before
    calls.clear()
    assert equal(load("flux").run(**SMALL).output, own.output)
    assert calls == []


def test_a_backend_that_cannot_run_here_is_no_choice(register, load):
    def broken(query, key, value, **kwargs):
        raise RuntimeError("no kernel for this device")

    register("_flash_3", broken)
    with pytest.raises(ConfigError, match="no kernel for this device"):
        load("flux", diffusion_attention_backend="FLASH_ATTN")


def test_the_names_are_those_of_native_models():
    in_codes = {name for forms in EIGHT_BIT.values() for name in forms.values()}
    assert {AUTO, *ATTEMPTS} == set(names()) - in_codes - {"OMNI_CPU"}
    assert ATTEMPTS["FLASH_ATTN"][:2] == ATTEMPTS["FLASH_ATTN_3"]
    assert ATTEMPTS["FLASH_ATTN"][2:] == ATTEMPTS["FLASH_ATTN_2"]


@pytest.mark.parametrize("asked", ["OMNI_INT8", "FLASH_ATTN_3_FP8", "INT8_EMULATION", "OMNI_CPU"])
def test_attention_that_is_built_into_models_is_for_native_ones(asked, load):
    with pytest.raises(ConfigError, match="is for native models") as caught:
        load("flux", diffusion_attention_backend=asked)
    assert caught.value.reason == "ATTENTION_UNAVAILABLE"
    assert [violation.field for violation in caught.value.violations] == ["diffusion_attention_backend"]


@pytest.mark.parametrize(("asked", "used"), [("auto", "native"), ("sdpa", "native")])
def test_auto_and_other_names_are_known(asked, used, load):
    assert load("flux", diffusion_attention_backend=asked).loaded.found.attention_backend == used


@pytest.mark.parametrize("asked", ["FLASH_ATTN", "FLASH_ATTN_2", "SAGE_ATTN"])
def test_all_failed_attempts_are_listed(asked, load):
    with pytest.raises(ConfigError, match="--allow-attention-fallback") as caught:
        load("flux", diffusion_attention_backend=asked)
    assert caught.value.reason == "ATTENTION_UNAVAILABLE"
    positions = [str(caught.value).index(f"{name}: ") for name in ATTEMPTS[asked]]
    assert positions == sorted(positions)


def test_a_fallback_is_allowed_and_said(load):
    adapter = load("flux", diffusion_attention_backend="SAGE_ATTN", allow_attention_fallback=True)
    (warning,) = adapter.loaded.warnings
    assert (warning.code, warning.requested, warning.applied) == ("ATTENTION_FALLBACK", "SAGE_ATTN", "native")
    assert "sage_hub" in warning.message
    assert adapter.loaded.found.attention_backend == "native"
    assert adapter.run(**SMALL).files


def test_the_librarys_own_can_be_asked_for(load):
    for name in ("flux", "stable_diffusion"):
        assert load(name, diffusion_attention_backend="TORCH_SDPA").loaded.found.attention_backend == "native"


def test_a_denoiser_whose_attention_is_fixed_says_so(register, load):
    register("_flash_3", lambda query, key, value, **kwargs: query)
    with pytest.raises(ConfigError, match="UNet2DConditionModel does not let its attention be chosen"):
        load("stable_diffusion", diffusion_attention_backend="FLASH_ATTN")


def test_the_flash_3_of_our_gpu_extra_is_offered_to_diffusers(monkeypatch):
    monkeypatch.setattr(attention_dispatch, "_CAN_USE_FLASH_ATTN_3", False)
    monkeypatch.setattr(attention_dispatch, "flash_attn_3_func", None)
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", None)
    _offer_flash_3()
    assert not attention_dispatch._CAN_USE_FLASH_ATTN_3
    module = types.ModuleType("fa3_fwd_interface")
    module.flash_attn_func = lambda *args, **kwargs: None
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", module)
    _offer_flash_3()
    assert attention_dispatch._CAN_USE_FLASH_ATTN_3
    assert attention_dispatch.flash_attn_3_func is module.flash_attn_func
