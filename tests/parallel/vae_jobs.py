"""What ranks are asked to decode."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from omni_grpc.features.vae_parallel import Slabs, _prepare
from omni_grpc.types.errors import ConfigError
from omni_grpc.types.ranks import Axis
from omni_grpc.types.spec import Checkpoint
from tests.parallel.jobs import Ranked, device_of
from tests.parallel.model_jobs import load, refused


@torch.inference_mode()
def decode(mesh: Ranked, checkpoint: Checkpoint, shapes: Sequence[tuple[int, int, int]]) -> list[Tensor]:
    """Latents of these frames, rows and columns, through the VAE of a model; in float32 on GPUs too, where cuDNN would
    choose a convolution in TF32 by the size of a slab.
    """
    vae = load(mesh, checkpoint, {}).get_submodule("vae")
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(vae.channels, *shape, generator=generator) for shape in shapes]
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        return [vae.decode(latents.to(device_of(mesh))).cpu() for latents in drawn]


class Decoder(nn.Module):
    """Convolutions of unlike reach, a group norm and a doubling of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.twice = nn.Upsample(scale_factor=2.0)
        self.last = nn.Conv2d(4, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.twice(self.norm(self.first(x))))
        return out


@torch.inference_mode()
def rows_computed(mesh: Ranked, rows: int) -> list[int]:
    """Of the latents, by each convolution, in rows of the latents' or twice as many."""
    torch.manual_seed(0)
    decoder, seen = Decoder(), []
    shared = decode_all = lambda latents: decoder(latents.transpose(0, 1)).float()
    if mesh is not None:
        slabs = Slabs(mesh.groups[Axis.VAE])
        _prepare(decoder, slabs)
        shared = slabs.around(decode_all)
    for layer in (decoder.first, decoder.last):
        compute = layer._conv_forward

        def counted(x: Tensor, *rest: object, compute: object = compute) -> Tensor:
            seen.append(x.shape[-2])
            return compute(x, *rest)  # type: ignore[operator]

        layer._conv_forward = counted  # type: ignore[method-assign]
    shared(torch.randn(4, 1, rows, 5))
    return seen


def refusal(mesh: Ranked, decoder: nn.Module) -> str:
    assert mesh is not None
    try:
        _prepare(decoder, Slabs(mesh.groups[Axis.VAE]))
    except ConfigError as error:
        return str(error)
    return ""


def with_tiling(mesh: Ranked, checkpoint: Checkpoint) -> str:
    return refused(mesh, checkpoint, {"vae_use_tiling": True})
