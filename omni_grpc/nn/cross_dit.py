"""The block of video transformers that attend to themselves, and across to a text: Wan (https://arxiv.org/abs/2503.20314,
section 4.2.2) and the families built on it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omni_grpc.nn.activations import Activation, add_norm, norm
from omni_grpc.nn.attention import Attention
from omni_grpc.nn.dual_stream import IMG, TXT
from omni_grpc.nn.embeddings import ScalarEmbedder, sinusoid
from omni_grpc.nn.feed_forward import FeedForward
from omni_grpc.nn.linear import AnyLinear, Linear
from omni_grpc.nn.norms import AcrossHeadsNorm, Float32LayerNorm
from omni_grpc.nn.query_key import Projected, attend
from omni_grpc.nn.row_changes import affine, normed, table_of
from omni_grpc.nn.rows import JOINT, MOD, Rows
from omni_grpc.nn.stack import Block
from omni_grpc.ops.norm import gate_add, norm_modulate

TEXT_K, TEXT_V = "text_k", "text_v"


class CrossDitSelfAttention(nn.Module):
    """Attention of a row's tokens to each other. The rows have "rope" [T, head_size / 2, 2] bound to the stream."""

    row_parameters = ("norm_q", "norm_k")

    def __init__(self, channels: int, num_heads: int, head_size: int, eps: float, stream: str = IMG) -> None:
        super().__init__()
        inner = num_heads * head_size
        self.head_size, self.stream = head_size, stream
        self.to_qkv: AnyLinear = Linear(channels, 3 * inner, stream=stream)
        self.norm_q, self.norm_k = AcrossHeadsNorm(inner, eps), AcrossHeadsNorm(inner, eps)
        self.attention = Attention(num_heads, head_size, role="self")
        self.to_out = Linear(inner, channels, stream=stream)

    def forward(self, x: Activation, rows: Rows) -> Tensor:
        q, k, v = self.to_qkv(x).unflatten(-1, (3, -1, self.head_size)).unbind(1)
        out: Tensor = self.to_out(self.attend(Projected(q, k, v, self.norm_q, self.norm_k), rows).flatten(1))
        return out

    def attend(self, part: Projected, rows: Rows) -> Tensor:
        """[T, heads, head_size]."""
        return attend(self.attention, part, rows["rope"], rows, over=self.stream)


class CrossAttention(nn.Module):
    """Attention of a row's tokens to its text, whose keys and values are made once, by `keys_values`."""

    row_parameters = ("norm_q", "norm_k")

    def __init__(self, channels: int, num_heads: int, head_size: int, eps: float) -> None:
        super().__init__()
        inner = num_heads * head_size
        self.head_size = head_size
        self.to_q: AnyLinear = Linear(channels, inner, stream=IMG)
        self.to_kv = Linear(channels, 2 * inner, stream=TXT)
        self.norm_q, self.norm_k = AcrossHeadsNorm(inner, eps), AcrossHeadsNorm(inner, eps)
        self.attention = Attention(num_heads, head_size, role="cross")
        self.to_out = Linear(inner, channels, stream=IMG)

    def keys_values(self, txt: Tensor) -> tuple[Tensor, Tensor]:
        """Text tokens [T_txt, C] -> keys and values, each [T_txt, heads, head_size]."""
        k, v = self.to_kv(txt).chunk(2, -1)
        return _heads(normed(self.norm_k, k, TXT), self.head_size), _heads(v, self.head_size)

    def forward(self, x: Activation, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
        """x [T, C], and the text's k and v [T_txt, heads, head_size] -> [T, C]."""
        q = _heads(normed(self.norm_q, self.to_q(x), IMG), self.head_size)
        out: Tensor = self.to_out(self.attention(q, k, v, rows, over=IMG, kv=TXT).flatten(1))
        return out


class CrossDiTBlock(Block):
    """Self attention, attention to the text, feed-forward. The first and the last are modulated and gated.

    All blocks share one modulation [M, 6C], (shift, scale, gate) of the self attention and of the feed-forward, to
    which each adds a table of its own. Norms, modulation, gates and the sums they go into are computed in float32 and
    rounded to the dtype of the tokens after each.

    The text comes as constants, see `text_constants`: "text_k" and "text_v", [T_txt, blocks, heads, head_size].

    With `stream` "joint" the block runs over all streams of a row, of which "img" alone looks across to the text; the
    text stays aside (`Row.aside`).
    """

    constants = (TEXT_K, TEXT_V)
    row_parameters = ("norm2", "scale_shift_table")

    def __init__(
        self, num_heads: int, head_size: int, ff_channels: int, eps: float = 1e-6, *, stream: str = IMG
    ) -> None:
        super().__init__()
        channels = num_heads * head_size
        self.carry = (stream,)
        self.eps = eps
        self.attn1 = CrossDitSelfAttention(channels, num_heads, head_size, eps, stream)
        self.norm2 = Float32LayerNorm(channels, eps)
        self.attn2 = CrossAttention(channels, num_heads, head_size, eps)
        self.ffn = FeedForward(channels, ff_channels, stream=stream)
        self.scale_shift_table = nn.Parameter(torch.zeros(1, 6, channels))

    def modulation(self, temb: Tensor) -> Tensor:
        """`temb` [S, 6C] itself: it is the same for all blocks, and the table is added as the block runs."""
        return temb

    def forward(self, *carry: Tensor, rows: Rows, mod: Tensor, **constants: Tensor) -> tuple[Tensor, ...]:
        """Tokens [T, C], mod [M, 6C], "text_k" and "text_v" [T_txt, heads, head_size] -> [T, C]."""
        (x,) = carry
        (stream,) = self.carry
        index = rows.index[stream]
        shift, scale, gate, ff_shift, ff_scale, ff_gate = self._vectors(mod)

        before, across = affine(self.norm2, None, rows), (self.attn2.to_q,)

        out = self.attn1(norm(x, scale, shift, index, self.eps, (self.attn1.to_qkv,)), rows)
        if stream == JOINT:
            parts = rows.split(gate_add(x, out, gate, index))
            img = norm(parts[IMG], before.scale, before.shift, rows.index[IMG], self.eps, across, **before.options)
            img = parts[IMG] + self._across(img, rows, constants)
            x = rows.join({**parts, IMG: img})
            read = norm(x, ff_scale, ff_shift, index, self.eps, self.ffn.readers)
        else:
            x, read = add_norm(x, out, gate, before.scale, before.shift, index, self.eps, across, **before.options)
            out = self._across(read, rows, constants)
            x, read = add_norm(x, out, None, ff_scale, ff_shift, index, self.eps, self.ffn.readers)
        return (gate_add(x, self.ffn(read), ff_gate, index),)

    def _across(self, x: Activation, rows: Rows, constants: dict[str, Tensor]) -> Tensor:
        out: Tensor = self.attn2(x, constants[TEXT_K], constants[TEXT_V], rows)
        return out

    def signal(self, *carry: Tensor, rows: Rows, mod: Tensor, **constants: Tensor) -> Tensor:
        """The input of the self attention [T, C]: tokens after the first norm and modulation."""
        shift, scale, *_ = self._vectors(mod)
        return norm_modulate(carry[0], scale, shift, rows.index[self.carry[0]], self.eps)

    def _vectors(self, mod: Tensor) -> tuple[Tensor, ...]:
        """[M, 6C] -> the block's own modulation, six times [M, C] in float32."""
        vectors: tuple[Tensor, ...] = (table_of(self, "scale_shift_table") + mod.float().unflatten(-1, (6, -1))).unbind(
            1
        )
        return vectors


class TextProjection(nn.Module):
    """Linear, GELU (tanh approximation), Linear: hidden states of the text encoder [T_txt, in] -> [T_txt, out]."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.linear_1 = Linear(in_channels, out_channels, stream=TXT)
        self.linear_2 = Linear(out_channels, out_channels, stream=TXT)

    def forward(self, x: Tensor) -> Tensor:
        """x [T_txt, in] -> [T_txt, out]."""
        out: Tensor = self.linear_2(F.gelu(self.linear_1(x), approximate="tanh"))
        return out


class ConditionEmbedder(nn.Module):
    """What the blocks are told besides the latents: the timestep and the text."""

    def __init__(self, channels: int, *, frequencies: int, text_channels: int) -> None:
        super().__init__()
        self.frequencies = frequencies
        self.time_embedder = ScalarEmbedder(frequencies, channels)
        self.time_proj = Linear(channels, 6 * channels, stream=MOD)
        self.text_embedder = TextProjection(text_channels, channels)

    def time(self, t: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Timesteps float32 [S] in the scheduler's units -> their embeddings [S, C], which are computed in float32 and
        rounded to `dtype`, and the modulation that all blocks share, [S, 6C].
        """
        temb = self.time_embedder(sinusoid(t, self.frequencies, scale=1.0)).to(dtype)
        return temb, self.time_proj(F.silu(temb))


def text_constants(blocks: Sequence[CrossDiTBlock], txt: Tensor) -> dict[str, tuple[str, Tensor]]:
    """The keys and values of a text in every block, as `Cond.constants` has them; txt [T_txt, C] are its tokens.

    Each tensor is written block by block, so that the most that is held at once is what is kept, plus one block's part.
    """
    attention = blocks[0].attn2.attention
    keys = txt.new_empty(len(txt), len(blocks), attention.num_kv_heads, attention.head_size)
    values = torch.empty_like(keys)
    for place, block in enumerate(blocks):
        keys[:, place], values[:, place] = block.attn2.keys_values(txt)
    return {TEXT_K: (TXT, keys), TEXT_V: (TXT, values)}


def _heads(x: Tensor, head_size: int) -> Tensor:
    """[T, H * D] -> [T, H, D]."""
    heads: Tensor = x.unflatten(-1, (-1, head_size))
    return heads
