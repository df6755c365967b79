"""The single-stream block against the blocks of Z-Image and Lumina 2 in diffusers, with their weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch._dynamo.testing
from diffusers.models.transformers.transformer_lumina2 import Lumina2TransformerBlock
from diffusers.models.transformers.transformer_z_image import ZImageTransformerBlock
from torch import Tensor, nn
from torch.nn.functional import silu

from omni_grpc.loading.checkpoint import WEIGHT_FILE, load_weights
from omni_grpc.models.z_image import TRANSFORMER_WEIGHTS
from omni_grpc.nn.rows import JOINT, LayoutCache, Row, Rows
from omni_grpc.nn.single_stream import SingleStreamBlock
from omni_grpc.nn.stack import Stack
from omni_grpc.types.spec import WeightMap
from tools.tiny.images import disturb_norms

HEADS, SIZE, HIDDEN = 4, 16, 170
CHANNELS = HEADS * SIZE
LUMINA_2 = WeightMap(
    renames=(
        (r"^layers\.", "stack.single."),
        (r"\.attn\.", ".attention."),
        (r"\.to_out\.0\.", ".to_out."),
        (r"\.linear_([123])\.", r".w\1."),
        (r"\.norm1\.linear\.", ".adaLN_modulation."),
        (r"\.norm1\.(norm\.)?", ".attention_norm1."),
        (r"\.norm2\.", ".attention_norm2."),
    ),
    fused=TRANSFORMER_WEIGHTS.fused,
)

Oracle = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Tokens [1, T, C], complex turns [1, T, D / 2] and the timestep's embedding [1, C] -> tokens."""


def z_image(modulated: bool) -> tuple[nn.Module, Oracle, WeightMap]:
    block = ZImageTransformerBlock(0, CHANNELS, HEADS, HEADS, 1e-5, True, modulation=modulated)
    return block, lambda x, turns, temb: block(x, None, turns, temb), TRANSFORMER_WEIGHTS


def lumina_2(modulated: bool) -> tuple[nn.Module, Oracle, WeightMap]:
    """Grouped queries; the block itself applies SiLU to the embedding, which ours expects to be done."""
    block = Lumina2TransformerBlock(CHANNELS, HEADS, HEADS // 2, 1, HIDDEN / CHANNELS / 4, 1e-5, modulation=modulated)
    return block, lambda x, turns, temb: block(x, None, turns, temb), LUMINA_2


@pytest.mark.parametrize("stream", [JOINT, "img", "txt"])
@pytest.mark.parametrize("modulated", [True, False])
@pytest.mark.parametrize("kind", [z_image, lumina_2])
@torch.no_grad()
def test_unlike_rows_get_what_diffusers_gives_each(kind, modulated: bool, stream: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs, oracle, weights = kind(modulated)
    disturb_norms(theirs.eval())
    safetensors.torch.save_file({f"layers.0.{k}": v for k, v in theirs.state_dict().items()}, tmp_path / WEIGHT_FILE)
    kv_heads = HEADS // 2 if kind is lumina_2 else None
    temb_channels = CHANNELS if modulated else None
    block = SingleStreamBlock(HEADS, SIZE, HIDDEN, temb_channels, num_kv_heads=kv_heads, stream=stream)
    module = nn.Module()
    module.stack = Stack(single=[block])
    load_weights(module, tmp_path, weights, device="cpu", dtype=torch.float32)

    rows = Rows([(None, "cond")] * 3, [Row.of(txt=t, img=i) for t, i in ((7, 12), (3, 5), (1, 8))], LayoutCache("cpu"))
    tokens = rows.stream(stream)
    x, temb, angles = (
        torch.randn(tokens.total, CHANNELS),
        torch.randn(3, CHANNELS),
        torch.randn(tokens.total, SIZE // 2),
    )
    name = "rope" if stream == JOINT else f"rope_{stream}"
    rows.bind(name, stream, tokens.split(torch.stack([angles.cos(), angles.sin()], -1)))
    table = module.stack.modulation(silu(temb) if kind is lumina_2 else temb)["single"]
    rows.bind("single", "mod", table.split(1))

    out = module.stack({stream: x}, rows)[stream]
    turns = torch.polar(torch.ones_like(angles), angles)
    for row in range(3):
        part = tokens.slice(row)
        expected = oracle(x[part][None], turns[part][None], temb[row : row + 1])[0]
        torch.testing.assert_close(out[part], expected, atol=5e-6, rtol=1e-5)
        assert (out[part] - x[part]).abs().max() > 0.1


@pytest.mark.parametrize("stream", [JOINT, "img"])
def test_a_block_compiles_once_for_many_rows_and_once_for_one(stream: str) -> None:
    block = SingleStreamBlock(2, 32, 88, 48, num_kv_heads=1, stream=stream).requires_grad_(False)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(block, fullgraph=True, backend=counter, dynamic=True)
    generator = torch.Generator().manual_seed(0)
    # no size is 1, nor equal to a size of the weights: torch gives equal sizes one symbol, and then makes it a constant
    sizes = [Row.of(txt=7, img=35), Row.of(txt=19, img=24), Row.of(txt=12, img=26)]
    counts = []
    for chosen in ((0, 1, 2), (0, 1), (2, 1, 0, 1), (0,), (2,)):
        rows = Rows([(None, "cond")] * len(chosen), [sizes[number] for number in chosen], LayoutCache("cpu"))
        tokens = rows.stream(stream)
        tables = [torch.randn(length, 16, 2, generator=generator) for length in tokens.lengths]
        rows.bind("rope" if stream == JOINT else "rope_img", stream, tables)
        mod = block.modulation(torch.randn(len(chosen), 48, generator=generator))
        x = torch.randn(tokens.total, 64, generator=generator)
        (out,), (eager,) = compiled(x, rows=rows, mod=mod), block(x, rows=rows, mod=mod)
        torch.testing.assert_close(out, eager)
        counts.append(counter.frame_count)
    assert counts[0] == counts[1] == counts[2], counts
    assert counts[3] == counts[4], counts
