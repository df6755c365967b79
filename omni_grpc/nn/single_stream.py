"""The single-stream block with sandwich norms of Lumina-Image 2.0 (https://arxiv.org/abs/2503.21758): one set of
weights for all tokens, a norm before and after each sublayer. Shared by several families of models.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from omni_grpc.nn.activations import Activation, add_norm, norm
from omni_grpc.nn.attention import Attention
from omni_grpc.nn.feed_forward import SwiGLU
from omni_grpc.nn.linear import AnyLinear, Linear
from omni_grpc.nn.query_key import Projected, attend
from omni_grpc.nn.row_changes import affine, gate_affine
from omni_grpc.nn.rows import JOINT, MOD, Rows
from omni_grpc.nn.stack import Block
from omni_grpc.ops.norm import gate_add, norm_modulate

QK_EPS = 1e-5
"""Of the norms of queries and keys. No config of these families changes it."""


class SingleStreamAttention(nn.Module):
    """Attention of one stream to itself, with RMS norms of queries and keys per head."""

    row_parameters = ("norm_q", "norm_k")

    def __init__(self, num_heads: int, head_size: int, num_kv_heads: int, stream: str) -> None:
        super().__init__()
        channels = num_heads * head_size
        self.stream = stream
        self.head_size = head_size
        self.to_qkv: AnyLinear = Linear(channels, (num_heads + 2 * num_kv_heads) * head_size, bias=False, stream=stream)
        self.norm_q, self.norm_k = nn.RMSNorm(head_size, QK_EPS), nn.RMSNorm(head_size, QK_EPS)
        self.attention = Attention(
            num_heads, head_size, num_kv_heads, role="self", role_category=JOINT if stream == JOINT else None
        )
        self.to_out = Linear(channels, channels, bias=False, stream=stream)

    def forward(self, x: Activation, rope: Tensor, rows: Rows) -> Tensor:
        """x [T, C], rope [T, head_size / 2, 2] -> [T, C]."""
        kv_heads = self.attention.num_kv_heads
        heads = (self.attention.num_heads, kv_heads, kv_heads)
        q, k, v = self.to_qkv(x).unflatten(-1, (-1, self.head_size)).split(heads, 1)
        part = Projected(q, k, v, self.norm_q, self.norm_k)
        out: Tensor = self.to_out(attend(self.attention, part, rope, rows, over=self.stream).flatten(1))
        return out


class SingleStreamBlock(Block):
    """Attention, then a feed-forward; each is normed, scaled, normed again, gated and added.

    stream: what the block works on: every token of a row ("joint"), or one stream alone (a refiner).
    hidden: channels inside the feed-forward. num_kv_heads below num_heads is grouped-query attention.
    temb_channels: those of the timestep's embedding; None for a block that is not modulated.

    Modulation: [M, 4C], factor and gate of the attention and of the feed-forward; there is no shift. The factor is 1 +
    the predicted scale and the gate is the tanh of the predicted one, so both are computed ahead with the tables. The
    embedding is taken as it is: some families put it through SiLU before, others do not.

    The rows have the rotary table of the stream bound to it, [T_s, head_size / 2, 2]: "rope" over all tokens of a row,
    "rope_img" over one stream.
    """

    row_parameters = ("attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2")

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        hidden: int,
        temb_channels: int | None,
        *,
        num_kv_heads: int | None = None,
        stream: str = JOINT,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        channels = num_heads * head_size
        self.carry = (stream,)
        self.channels = channels
        self.eps = eps
        self.rope = "rope" if stream == JOINT else f"rope_{stream}"
        self.attention = SingleStreamAttention(num_heads, head_size, num_kv_heads or num_heads, stream)
        self.feed_forward = SwiGLU(channels, hidden, stream=stream)
        self.attention_norm1, self.attention_norm2 = nn.RMSNorm(channels, eps), nn.RMSNorm(channels, eps)
        self.ffn_norm1, self.ffn_norm2 = nn.RMSNorm(channels, eps), nn.RMSNorm(channels, eps)
        self.adaLN_modulation = None
        if temb_channels is not None:
            self.adaLN_modulation = Linear(temb_channels, 4 * channels, stream=MOD)

    def modulation(self, temb: Tensor) -> Tensor:
        """[S, temb_channels] -> [S, 4C]; ones, which change nothing, where the block is not modulated."""
        if self.adaLN_modulation is None:
            return temb.new_ones(len(temb), 4 * self.channels)
        scale_attn, gate_attn, scale_ff, gate_ff = self.adaLN_modulation(temb).chunk(4, -1)
        return torch.cat([1 + scale_attn, gate_attn.tanh(), 1 + scale_ff, gate_ff.tanh()], -1)

    def forward(self, *carry: Tensor, rows: Rows, mod: Tensor, **constants: Tensor) -> tuple[Tensor, ...]:
        """Tokens of the block's stream [T, C], and mod [M, 4C] -> [T, C]."""
        (x,) = carry
        index = rows.index[self.carry[0]]
        scale_attn, gate_attn, scale_ff, gate_ff = mod.chunk(4, -1)

        before = affine(self.attention_norm1, scale_attn, rows, base=0.0)
        first = norm(x, before.scale, None, index, self.eps, (self.attention.to_qkv,), rms=True, **before.options)
        out = self.attention(first, rows[self.rope], rows)
        before = affine(self.ffn_norm1, scale_ff, rows, base=0.0)
        gate, y_weight = gate_affine(self.attention_norm2, gate_attn)
        x, second = add_norm(
            x,
            out,
            gate,
            before.scale,
            None,
            index,
            self.eps,
            self.feed_forward.readers,
            rms=True,
            y_weight=y_weight,
            **before.options,
        )
        out = self.feed_forward(second)
        gate, y_weight = gate_affine(self.ffn_norm2, gate_ff)
        return (gate_add(x, out, gate, index, self.eps, y_weight=y_weight),)

    def signal(self, *carry: Tensor, rows: Rows, mod: Tensor, **constants: Tensor) -> Tensor:
        """The input of the attention [T, C]: tokens after the first norm and scale."""
        index = rows.index[self.carry[0]]
        # the scale is the factor itself
        before = affine(self.attention_norm1, mod.chunk(4, -1)[0], rows, base=0.0)
        return norm_modulate(carry[0], before.scale, None, index, self.eps, rms=True, **before.options)
