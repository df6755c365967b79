"""Attention of the denoiser, by the names that users know."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence

import torch
from diffusers import ModelMixin
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn

from omni_grpc.config.backends import SETTING, refused
from omni_grpc.types.os_errors import plain
from omni_grpc.types.results import RequestWarning

logger = logging.getLogger(__name__)

ATTEMPTS: Mapping[str, tuple[str, ...]] = {
    "FLASH_ATTN": ("_flash_3_hub", "_flash_3", "flash_hub", "flash"),
    "FLASH_ATTN_3": ("_flash_3_hub", "_flash_3"),
    "FLASH_ATTN_2": ("flash_hub", "flash"),
    "SAGE_ATTN": ("sage_hub", "sage"),
    "CUDNN_ATTN": ("_native_cudnn",),
    "TORCH_SDPA": ("native",),
}
"""Names of `config.backends`, and diffusers' names in the order in which they are tried: newer versions first, the
kernels library before packages. What computes in 8 bits has to be built into a model, and our own kernel for CPUs takes
packed rows: these are not among them.
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChosenBackend:
    """What the denoiser runs on, and what to tell every caller about it."""

    name: str
    warnings: tuple[RequestWarning, ...] = ()


def choose(
    denoisers: Sequence[ModelMixin], asked: str | None, *, fallback: bool, device: torch.device, dtype: torch.dtype
) -> ChosenBackend:
    """Sets the first backend of `asked` that can be set and runs. Raises ConfigError with every attempt where none
    does, or, with `fallback`, leaves the library's own and warns.
    """
    if asked is None:
        return ChosenBackend(name=attention_dispatch._AttentionBackendRegistry.get_active_backend()[0].value)
    if asked not in ATTEMPTS:
        message = (
            f"--diffusion-attention-backend {asked} is for native models; this pipeline takes {', '.join(ATTEMPTS)}"
        )
        raise refused(SETTING, message, "ATTENTION_UNAVAILABLE")
    _offer_flash_3()
    failed: list[str] = []
    for name in ATTEMPTS[asked]:
        try:
            _set(denoisers, name, device, dtype)
        except Exception as error:  # noqa: BLE001 - whatever keeps one from working, the next is tried and all are listed
            failed.append(f"{name}: {type(error).__name__}: {plain(error)}")
            logger.warning("attention %s: %s", asked, failed[-1])
        else:
            logger.info("attention %s: %s, after %d failed attempts", asked, name, len(failed))
            return ChosenBackend(name=name)
    attempts = "; ".join(failed)
    if not fallback:
        message = (
            f"--diffusion-attention-backend {asked} cannot be had here: {attempts}. "
            "Install one of them, leave the setting out, or add --allow-attention-fallback"
        )
        raise refused(SETTING, message, "ATTENTION_UNAVAILABLE")
    own = attention_dispatch._AttentionBackendRegistry.get_active_backend()[0].value
    warning = RequestWarning(
        code="ATTENTION_FALLBACK",
        field="diffusion_attention_backend",
        message=f"{asked} could not be had: {attempts}",
        requested=asked,
        applied=own,
    )
    return ChosenBackend(name=own, warnings=(warning,))


def _offer_flash_3() -> None:
    """diffusers looks for FlashAttention 3 in a package called flash_attn_3; the wheel of our `gpu` extra, fa3-fwd, has
    the same function under another name.
    """
    if attention_dispatch._CAN_USE_FLASH_ATTN_3:
        return
    try:
        from fa3_fwd_interface import flash_attn_func
    except ImportError as error:
        logger.debug("no fa3-fwd: %s", error)
        return
    attention_dispatch.flash_attn_3_func = flash_attn_func
    attention_dispatch._CAN_USE_FLASH_ATTN_3 = True


def _set(denoisers: Sequence[ModelMixin], name: str, device: torch.device, dtype: torch.dtype) -> None:
    registry = attention_dispatch._AttentionBackendRegistry
    # setting it on one model makes it the default of the whole process, other engines' models included
    before = registry.get_active_backend()[0]
    try:
        for denoiser in denoisers:
            denoiser.set_attention_backend(name)
    finally:
        registry.set_active_backend(before)
    backend = AttentionBackendName(name)
    for denoiser in denoisers:
        following = [m for m in denoiser.modules() if _backend(m) is backend]
        if not following and name != "native":
            raise ValueError(f"{type(denoiser).__name__} does not let its attention be chosen")
    # a backend that can be set may still have no kernel for this device
    query = torch.randn(1, 16, 2, 64, device=device, dtype=dtype)
    dispatch_attention_fn(query, query, query, backend=backend)


def _backend(module: torch.nn.Module) -> AttentionBackendName | None:
    processor = getattr(module, "processor", None)
    backend: AttentionBackendName | None = getattr(processor, "_attention_backend", None)
    return backend
