"""The VAEs of videos in fewer operations: they give what diffusers' do."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLQwenImage, AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, WanRMS_norm
from torch.utils._python_dispatch import TorchDispatchMode

from omni_grpc.pipeline.causal_vae import optimize_causal_vae

SMALL = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 2, 2], "num_res_blocks": 1, "latents_mean": [0.0] * 4}
KINDS: Mapping[str, Callable[[], Any]] = {
    "pictures": lambda: AutoencoderKLQwenImage(**SMALL, latents_std=[1.0] * 4, temperal_downsample=[False, False]),
    "qwen": lambda: AutoencoderKLQwenImage(**SMALL, latents_std=[1.0] * 4, temperal_downsample=[False, True]),
    "wan": lambda: AutoencoderKLWan(**SMALL, latents_std=[1.0] * 4, temperal_downsample=[True, True]),
}


class Convolutions(TorchDispatchMode):
    """Dimensions of what is convolved."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.convolution.default:
            self.seen.append(args[0].dim())
        return func(*args, **(kwargs or {}))


def both(kind: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    plain = KINDS[kind]().eval().requires_grad_(False).to(dtype)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return plain, optimize_causal_vae(copy.deepcopy(plain))


@pytest.mark.parametrize("frames", [1, 2, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_it_decodes_and_encodes_as_diffusers_does(kind: str, frames: int) -> None:
    torch.manual_seed(frames)
    plain, quick = both(kind)
    latents = torch.randn(2, 4, frames, 6, 9)
    expected = plain.decode(latents).sample
    with Convolutions() as convolutions:
        made = quick.decode(latents).sample
    assert made.shape == expected.shape
    torch.testing.assert_close(made, expected, atol=2e-5, rtol=1e-4)
    with convolutions:
        encoded = quick.encode(expected).latent_dist.mode()
    torch.testing.assert_close(encoded, plain.encode(expected).latent_dist.mode(), atol=2e-5, rtol=1e-4)
    assert set(convolutions.seen) == {4}
    # its own count of what it keeps frames for is by class
    assert quick._cached_conv_counts == plain._cached_conv_counts


def test_a_first_frame_is_convolved_alone_in_half_precision_too() -> None:
    plain, quick = both("wan", torch.bfloat16)
    latents = torch.randn(1, 4, 1, 6, 9, dtype=torch.bfloat16)
    with Convolutions() as convolutions:
        made = quick.decode(latents).sample
    assert set(convolutions.seen) == {4}
    off = (made.float() - plain.decode(latents).sample.float()).norm() / made.float().norm()
    assert off < 0.03
    # more frames at once go to what torch has for them
    latents = torch.randn(1, 4, 3, 6, 9, dtype=torch.bfloat16)
    with Convolutions() as convolutions:
        made = quick.decode(latents).sample
    assert 5 in convolutions.seen
    off = (made.float() - plain.decode(latents).sample.float()).norm() / made.float().norm()
    assert off < 0.03


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("frames", [1, 3])
def test_on_a_gpu_it_decodes_as_diffusers_does(frames: int) -> None:
    plain, quick = (each.cuda() for each in both("wan"))
    latents = torch.randn(1, 4, frames, 16, 24, device="cuda")
    # else cuDNN rounds what it convolves to 10 bits, in two dimensions not as in three
    with torch.backends.cudnn.flags(allow_tf32=False), Convolutions() as convolutions:
        made = quick.decode(latents).sample
    with torch.backends.cudnn.flags(allow_tf32=False):
        torch.testing.assert_close(made, plain.decode(latents).sample, atol=2e-4, rtol=2e-4)
    assert 4 in convolutions.seen
    assert (5 in convolutions.seen) == (frames > 1)


@pytest.mark.parametrize("stride", [(1, 1, 1), (2, 1, 1), (1, 2, 2)])
@pytest.mark.parametrize(
    ("size", "padding"), [((3, 3, 3), (1, 1, 1)), ((3, 1, 1), (0, 0, 0)), (1, 0), ((3, 1, 1), (1, 0, 0))]
)
def test_any_causal_convolution(size: Any, padding: Any, stride: Any) -> None:
    torch.manual_seed(0)
    plain = WanCausalConv3d(3, 5, size, stride=stride, padding=padding).requires_grad_(False)
    quick = optimize_causal_vae(copy.deepcopy(plain))
    assert isinstance(quick, WanCausalConv3d)
    for frames in (1, 3, 4):
        x = torch.randn(2, 3, frames, 7, 8)
        for cache in (None, torch.randn(2, 3, 1, 7, 8), torch.randn(2, 3, 2, 7, 8)):
            if frames + plain._padding[4] + (0 if cache is None else 2) < plain.kernel_size[0] + 2:
                continue
            torch.testing.assert_close(quick(x, cache), plain(x, cache), atol=1e-5, rtol=1e-5)


def test_what_is_not_as_these_have_it_stays_diffusers() -> None:
    plain = WanCausalConv3d(4, 4, 3, padding=1)
    plain.groups, plain.weight = 2, torch.nn.Parameter(torch.randn(4, 2, 3, 3, 3))
    x = torch.randn(1, 4, 3, 5, 5)
    assert torch.equal(optimize_causal_vae(copy.deepcopy(plain))(x), plain(x))


def test_norms_over_channels() -> None:
    for images, shape in ((True, (2, 6, 5, 4)), (False, (2, 6, 3, 5, 4))):
        plain = WanRMS_norm(6, images=images, bias=True).requires_grad_(False)
        torch.nn.init.normal_(plain.gamma)
        torch.nn.init.normal_(plain.bias)
        quick = optimize_causal_vae(copy.deepcopy(plain))
        x = torch.randn(shape)
        x[0, :, 0, 0] = 0.0
        torch.testing.assert_close(quick(x), plain(x), atol=1e-6, rtol=1e-5)
        assert torch.equal(quick(x.bfloat16()), plain(x.bfloat16()))
