"""What a kernel of the image family must hold, as plain functions: pytest runs them, and so does tools/gpu_test.py.

Inputs are random and new in every run; a failure names the seed.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from omni_grpc.ops.image import latents_to_bytes, pixels_to_bytes

F32, BF16 = torch.float32, torch.bfloat16


@dataclasses.dataclass(frozen=True)
class Case:
    count: int
    height: int
    width: int
    dtype: torch.dtype = F32
    view: str = "whole"

    def __str__(self) -> str:
        return f"{self.count}x{self.height}x{self.width}-{str(self.dtype).removeprefix('torch.')}-{self.view}"


def _cases() -> Iterator[Case]:
    sizes = ((1, 1, 1), (2, 5, 7), (3, 16, 16), (1, 64, 80), (2, 33, 64), (1, 17, 241), (4, 48, 48))
    for (count, height, width), dtype in itertools.product(sizes, (F32, BF16)):
        yield Case(count, height, width, dtype)
    for view, dtype in itertools.product(("frames last", "cropped", "odd"), (F32, BF16)):
        yield Case(3, 32, 48, dtype, view)
    for count, height, width in ((0, 8, 8), (2, 0, 8), (1, 8, 0)):
        yield Case(count, height, width)


CASES = tuple(_cases())


def inputs(case: Case, device: str, seed: int) -> Tensor:
    """Pixels of which some lie outside of -1..1, laid out as the case says."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(case.count, 3, case.height, case.width, generator=generator).to(device, case.dtype)
    if case.view == "frames last":  # as video decoders give them
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if case.view == "cropped":
        wide = x.new_zeros(case.count, 3, case.height + 2, case.width + 3)
        wide[..., 1:-1, 2:-1] = x
        return wide[..., 1:-1, 2:-1]
    if case.view == "odd":  # no address is a multiple of 16
        flat = x.new_zeros(x.numel() + 1)
        flat[1:] = x.flatten()
        return flat[1:].view(x.shape)
    return x


def check_case(case: Case, device: str, seed: int) -> None:
    """To the bit what torch makes of it step by step, on the CPU."""
    pixels = inputs(case, device, seed)
    made, nonfinite = pixels_to_bytes(pixels)
    unit = (pixels.cpu() * 0.5 + 0.5).clamp(0, 1).float()
    want = (unit * 255).round().to(torch.uint8).permute(0, 2, 3, 1)
    about = f"{case} on {device}, seed {seed}"
    assert made.is_contiguous(), about
    assert made.dtype == torch.uint8, about
    assert torch.equal(made.cpu(), want), f"{about}: {(made.cpu() != want).sum()} bytes differ"
    assert nonfinite.tolist() == [0], about


def check_what_is_not_finite_is_counted(device: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for dtype, view in itertools.product((F32, BF16), ("whole", "odd")):
        pixels = inputs(Case(2, 64, 96, dtype, view), device, seed)
        where = torch.randperm(pixels.numel(), generator=generator)[:9].to(device)
        values = torch.tensor([torch.nan, torch.inf, -torch.inf] * 3, device=device, dtype=dtype)
        flat = pixels.flatten()
        flat[where] = values
        made, nonfinite = pixels_to_bytes(flat.view(pixels.shape))
        assert nonfinite.tolist() == [9], f"{dtype} {view} on {device}, seed {seed}: {nonfinite.tolist()}"
        bytes_there = made.permute(0, 3, 1, 2).flatten()[where].tolist()
        assert bytes_there == [0, 255, 0] * 3, f"{dtype} {view} on {device}, seed {seed}: {bytes_there}"


def check_latents(device: str, seed: int) -> None:
    """Against float64, within a byte where rounding may go either way."""
    generator = torch.Generator().manual_seed(seed)
    for channels, height, width, dtype in (
        (16, 32, 32, F32), (16, 90, 160, BF16), (1, 1, 1, F32), (3, 5, 7, BF16), (128, 9, 11, F32), (256, 4, 4, F32),
        (16, 0, 4, F32), (257, 4, 4, F32),
    ):  # fmt: skip
        for whole in (True, False):
            wide = torch.randn(channels, 2, height, width, generator=generator).to(device, dtype)
            latents = wide[:, 1] if whole else wide[:, 1].transpose(1, 2)
            factors = (torch.randn(3 * channels, generator=generator) * channels**-0.5).tolist()
            bias = [0.1, -0.2, 0.3]
            made = latents_to_bytes(latents, factors, bias)
            want = latents_to_bytes.reference(latents.double(), factors, bias)
            about = f"{channels}x{height}x{width} {dtype} on {device}, seed {seed}"
            assert made.shape == want.shape, about
            off = (made.int() - want.int()).abs()
            assert off.numel() == 0 or (off.amax() <= 1 and (off > 0).float().mean() < 0.01 + 1 / off.numel()), about


def check_no_number_is_black(device: str, seed: int) -> None:
    latents = torch.zeros(4, 6, 6, device=device)
    latents[2, 3, 1] = torch.nan
    made = latents_to_bytes(latents, [1.0] * 12, [0.0] * 3)
    assert made[3, 1].tolist() == [0, 0, 0], f"on {device}, seed {seed}"
    assert made.flatten().tolist().count(128) == 105, f"on {device}, seed {seed}"


CHECKS: tuple[Callable[[str, int], None], ...] = (
    check_what_is_not_finite_is_counted,
    check_latents,
    check_no_number_is_black,
)
CUDA_CHECKS = CHECKS
