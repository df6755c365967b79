"""The dual-stream block of MMDiT (https://arxiv.org/abs/2403.03206, figure 2b): text and image have weights of their
own and meet in one attention. Shared by several families of models."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from omni_grpc.nn.activations import Activation, Readers, add_norm, norm, split_joint
from omni_grpc.nn.attention import Attention
from omni_grpc.nn.feed_forward import FeedForward
from omni_grpc.nn.linear import AnyLinear, Linear
from omni_grpc.nn.query_key import Projected, attend_joint
from omni_grpc.nn.rows import MOD, Rows
from omni_grpc.nn.stack import Block
from omni_grpc.ops.norm import gate_add, norm_modulate

TXT, IMG = "txt", "img"


class JointAttention(nn.Module):
    """One attention over both streams, with projections and query/key norms per stream.

    The rows have "rope" [T_joint, head_size / 2, 2] bound to "joint".
    """

    row_parameters = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")

    def __init__(self, channels: int, num_heads: int, head_size: int, eps: float) -> None:
        super().__init__()
        inner = num_heads * head_size
        self.head_size = head_size
        self.to_qkv: AnyLinear = Linear(channels, 3 * inner, stream=IMG)
        self.add_qkv_proj: AnyLinear = Linear(channels, 3 * inner, stream=TXT)
        self.norm_q, self.norm_k = nn.RMSNorm(head_size, eps), nn.RMSNorm(head_size, eps)
        self.norm_added_q, self.norm_added_k = nn.RMSNorm(head_size, eps), nn.RMSNorm(head_size, eps)
        self.attention = Attention(num_heads, head_size, role="self", role_category="joint")
        self.to_out: AnyLinear = Linear(inner, channels, stream=IMG)
        self.to_add_out: AnyLinear = Linear(inner, channels, stream=TXT)

    def forward(self, txt: Activation, img: Activation, rows: Rows) -> tuple[Tensor, Tensor]:
        streams = {
            TXT: Projected(*self._heads(self.add_qkv_proj(txt)), self.norm_added_q, self.norm_added_k),
            IMG: Projected(*self._heads(self.to_qkv(img)), self.norm_q, self.norm_k),
        }
        joint = attend_joint(self.attention, streams, rows["rope"], rows).flatten(1)
        parts = split_joint(joint, rows, {TXT: self.to_add_out, IMG: self.to_out})
        return self.to_add_out(parts[TXT]), self.to_out(parts[IMG])

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, 3 * inner] -> q, k, v, each [T, H, D]."""
        q, k, v = qkv.unflatten(-1, (3, -1, self.head_size)).unbind(1)
        return q, k, v


class DualStreamBlock(Block):
    """Attention, then a feed-forward per stream; each is normed, modulated, gated and added.

    Modulation: [M, 12C], for text and then for image (shift, scale, gate) of the attention and of the feed-forward.
    """

    carry = (TXT, IMG)

    def __init__(self, num_heads: int, head_size: int, eps: float = 1e-6, ff_ratio: int = 4) -> None:
        super().__init__()
        channels = num_heads * head_size
        self.eps = eps
        self.txt_mod = Linear(channels, 6 * channels, stream=MOD)
        self.img_mod = Linear(channels, 6 * channels, stream=MOD)
        self.attn = JointAttention(channels, num_heads, head_size, eps)
        self.txt_mlp = FeedForward(channels, ff_ratio * channels, stream=TXT)
        self.img_mlp = FeedForward(channels, ff_ratio * channels, stream=IMG)

    def modulation(self, temb: Tensor) -> Tensor:
        """temb [S, C] -> [S, 12C]: the six vectors of the text stream, then those of the image stream."""
        return torch.cat([self.txt_mod(temb), self.img_mod(temb)], -1)

    def forward(self, *carry: Tensor, rows: Rows, mod: Tensor, **constants: Tensor) -> tuple[Tensor, ...]:
        """txt [T_txt, C], img [T_img, C] and mod [M, 12C] -> the new txt and img."""
        txt, img = carry
        txt_index, img_index = rows.index[TXT], rows.index[IMG]
        parts = mod.chunk(12, -1)
        txt_attn, txt_ff, img_attn, img_ff = parts[:3], parts[3:6], parts[6:9], parts[9:]

        txt_out, img_out = self.attn(
            self._normed(txt, txt_attn, txt_index, (self.attn.add_qkv_proj,)),
            self._normed(img, img_attn, img_index, (self.attn.to_qkv,)),
            rows,
        )
        txt, txt_normed = self._added(txt, txt_out, txt_attn[2], txt_ff, txt_index, self.txt_mlp.readers)
        img, img_normed = self._added(img, img_out, img_attn[2], img_ff, img_index, self.img_mlp.readers)

        txt = gate_add(txt, self.txt_mlp(txt_normed), txt_ff[2], txt_index)
        img = gate_add(img, self.img_mlp(img_normed), img_ff[2], img_index)
        return txt, img

    def signal(self, *carry: Tensor, rows: Rows, mod: Tensor, **constants: Tensor) -> Tensor:
        """The image stream's input to the attention [T_img, C]: tokens after the first norm and modulation."""
        shift, scale = mod.chunk(12, -1)[6:8]
        return norm_modulate(carry[1], scale, shift, rows.index[IMG], self.eps)

    def _normed(self, x: Tensor, mod: tuple[Tensor, ...], index: Tensor, readers: Readers) -> Activation:
        shift, scale, _ = mod
        return norm(x, scale, shift, index, self.eps, readers)

    def _added(
        self, x: Tensor, y: Tensor, gate: Tensor, mod: tuple[Tensor, ...], index: Tensor, readers: Readers
    ) -> tuple[Tensor, Activation]:
        """The stream after the attention's output y, and what the feed-forward reads of it."""
        shift, scale, _ = mod
        return add_norm(x, y, gate, scale, shift, index, self.eps, readers)
