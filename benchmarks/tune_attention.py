"""Measures, for shapes of the models that are served, which form of attention is the fastest on this machine's GPU.

    python -m benchmarks.tune_attention            into omni_grpc/ops/tuned/<card>_attention.json
    python -m benchmarks.tune_attention --seconds 60 --results FOLDER

What it finds comes with the package, see omni_grpc.ops.tuning. The shapes that count most come first: nothing new
starts after --seconds.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from omni_grpc.config.backends import AUTO, kernels_of
from omni_grpc.config.command_line import Parser
from omni_grpc.ops.attention import use_of
from omni_grpc.ops.attention_choice import QUANTIZED_DTYPE, RowSizes, operands, shape_of
from omni_grpc.ops.tuning import SHIPPED, Choices, slug

HEADS = ((24, 24, 128), (40, 40, 128), (12, 12, 128), (30, 30, 128), (38, 38, 64))
"""FLUX.1 and Qwen-Image, Wan 14B, Wan 1.3B, Z-Image, Stable Diffusion 3.5."""
DTYPES = {"bfloat16": AUTO, QUANTIZED_DTYPE: "FLASH_ATTN_3_FP8"}
ALONE = (4608, 1536, 9216, 2560, 768, 384, 192, 18432)
TOGETHER = (4608, 1536, 512)
TEXT = 512


def rows() -> Iterator[tuple[RowSizes, bool]]:
    """What is measured of each kind of heads, and whether it is for those of long videos alone."""
    for tokens in ALONE:
        yield RowSizes(1, True, tokens, tokens), False
    for count in (2, 4, 8):
        for tokens in TOGETHER:
            yield RowSizes(count, True, tokens, tokens), False
            yield RowSizes(count, False, tokens, tokens), False
    for tokens in (32760, 8190, 50000):
        yield RowSizes(1, True, tokens, TEXT), True
    for tokens in (32760, 50000):
        yield RowSizes(1, True, tokens, tokens), True


def main() -> None:
    parser = Parser(description="measure which form of attention is the fastest here")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--results", type=Path, default=SHIPPED, help="folder of the JSON file")
    options = parser.parse_args()
    card, device = torch.cuda.get_device_name(), torch.device("cuda", torch.cuda.current_device())
    path, deadline = options.results / f"{slug(card)}_attention.json", time.monotonic() + options.seconds
    found, done = Choices({}, path), 0
    for each, long in rows():
        for heads, kv_heads, size in HEADS:
            if long and heads < 40:
                continue
            for dtype, backend in DTYPES.items():
                if dtype == QUANTIZED_DTYPE and each.keys != each.tokens:
                    continue
                use = use_of(device, torch.bfloat16, size, causal=False, grouped=heads != kv_heads)
                allowed = kernels_of(backend, use)
                shape = shape_of(each, dtype, heads, kv_heads, size, False)
                candidates = functools.partial(operands, kernels=allowed)
                done += found.tune({shape: candidates}, device, deadline - time.monotonic())
    for family, sizes in sorted(json.loads(path.read_text()).items()):
        print(family, {size: min(times, key=times.__getitem__) for size, times in sizes.items()})
    print(f"{card}: {done} shapes measured, written: {path}")


if __name__ == "__main__":
    main()
