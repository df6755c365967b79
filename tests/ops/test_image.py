"""Bytes out of pixels and of latents: the kernels that this process dispatches to, and their references."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

from omni_grpc import ops
from omni_grpc.ops.image import latents_to_bytes, pixels_to_bytes
from tests.ops.image_cases import Case, inputs

NAMES = ("pixels_to_bytes", "latents_to_bytes")


@pytest.mark.parametrize("name", NAMES)
def test_the_native_kernels_are_registered(name: str) -> None:
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler, so no library")
    assert "CPU" in ops.kernels()[name], ops.load_native()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_are_served_by_the_reference(dtype: torch.dtype, seed: int) -> None:
    pixels = inputs(Case(2, 8, 8), "cpu", seed).to(dtype)
    made, nonfinite = pixels_to_bytes(pixels)
    want, none = pixels_to_bytes.reference(pixels)
    assert torch.equal(made, want)
    assert nonfinite.tolist() == none.tolist() == [0]


def test_the_references_are_those_of_the_kernels(seed: int) -> None:
    pixels = inputs(Case(2, 16, 24), "cpu", seed)
    pixels[0, 1, 2, 3] = torch.nan
    for mine, reference in zip(pixels_to_bytes(pixels), pixels_to_bytes.reference(pixels), strict=True):
        assert torch.equal(mine, reference)
        assert mine.dtype == reference.dtype


def test_opcheck(seed: int) -> None:
    pixels = inputs(Case(2, 8, 8), "cpu", seed)
    torch.library.opcheck(torch.ops.omni_grpc.pixels_to_bytes.default, (pixels,))
    torch.library.opcheck(
        torch.ops.omni_grpc.latents_to_bytes.default, (pixels[0], [0.1 * i for i in range(9)], [0.0, 0.1, 0.2])
    )


PIXELS = (torch.ops.omni_grpc.pixels_to_bytes.default, pixels_to_bytes.reference)
LATENTS = (torch.ops.omni_grpc.latents_to_bytes.default, latents_to_bytes.reference)


@pytest.mark.parametrize("which", [0, 1])
def test_wrong_inputs_are_refused_alike(which: int) -> None:
    refused: list[tuple[Any, tuple[Any, ...], str]] = [
        (PIXELS, (torch.zeros(3, 4, 4),), "pixels_to_bytes: pixels must be [N, 3, height, width], got"),
        (PIXELS, (torch.zeros(2, 4, 4, 4),), "pixels_to_bytes: pixels must be [N, 3, height, width], got"),
        (LATENTS, (torch.zeros(4, 4), [0.0] * 12, [0.0] * 3), "latents must be [C, height, width], got 2 dimensions"),
        (
            LATENTS,
            (torch.zeros(4, 4, 4), [0.0] * 9, [0.0] * 3),
            "4 channels take 12 factors and a bias of 3, got 9 and 3",
        ),
        (
            LATENTS,
            (torch.zeros(4, 4, 4), [0.0] * 12, [0.0]),
            "4 channels take 12 factors and a bias of 3, got 12 and 1",
        ),
    ]
    for functions, operands, message in refused:
        with pytest.raises(RuntimeError) as caught:
            functions[which](*operands)
        assert message in str(caught.value)


def test_more_channels_than_kernels_take(seed: int) -> None:
    latents = torch.randn(300, 3, 3, generator=torch.Generator().manual_seed(seed))
    factors = [0.01] * 900
    assert torch.equal(
        latents_to_bytes(latents, factors, [0.0] * 3), latents_to_bytes.reference(latents, factors, [0.0] * 3)
    )
