"""The parallel single-stream block: attention and feed-forward side by side over the joint stream, as in ViT-22B
(https://arxiv.org/abs/2302.05442, section 2). Families that have it run it after their dual-stream blocks."""

from __future__ import annotations

from torch import Tensor, nn

from omni_grpc.nn.activations import Activation, concat_gelu, norm
from omni_grpc.nn.attention import Attention
from omni_grpc.nn.coming import Begun
from omni_grpc.nn.linear import AnyLinear, Linear
from omni_grpc.nn.query_key import Projected, begin_attend
from omni_grpc.nn.rows import JOINT, MOD, Rows
from omni_grpc.nn.stack import Block
from omni_grpc.ops.norm import gate_add


class ParallelSelfAttention(nn.Module):
    """Attention over the joint stream without a projection of its own at the end: x [T, channels] -> [T, H, D].

    The rows have "rope" [T_joint, head_size / 2, 2] bound to "joint".
    """

    row_parameters = ("norm_q", "norm_k")

    def __init__(self, channels: int, num_heads: int, head_size: int, eps: float) -> None:
        super().__init__()
        self.head_size = head_size
        self.to_qkv: AnyLinear = Linear(channels, 3 * num_heads * head_size, stream=JOINT)
        self.norm_q, self.norm_k = nn.RMSNorm(head_size, eps), nn.RMSNorm(head_size, eps)
        self.attention = Attention(num_heads, head_size, role="self", role_category="joint")

    def begin(self, x: Activation, rows: Rows) -> Begun:
        """Begins the attention of x [T, channels]; what it returns gives [T, heads, head_size]."""
        q, k, v = self.to_qkv(x).unflatten(-1, (3, -1, self.head_size)).unbind(1)
        return begin_attend(self.attention, Projected(q, k, v, self.norm_q, self.norm_k), rows["rope"], rows)


class ParallelSingleBlock(Block):
    """One norm for both halves, one projection of both back into the stream; gated and added.

    Modulation: [M, 3C], (shift, scale, gate).
    """

    carry = (JOINT,)

    def __init__(self, num_heads: int, head_size: int, eps: float = 1e-6, ff_ratio: int = 4) -> None:
        super().__init__()
        channels = num_heads * head_size
        self.eps = eps
        self.mod = Linear(channels, 3 * channels, stream=MOD)
        self.attn = ParallelSelfAttention(channels, num_heads, head_size, eps)
        self.proj_mlp: AnyLinear = Linear(channels, ff_ratio * channels, stream=JOINT)
        self.proj_out: AnyLinear = Linear((1 + ff_ratio) * channels, channels, stream=JOINT)

    def modulation(self, temb: Tensor) -> Tensor:
        """temb [S, C] -> [S, 3C]."""
        out: Tensor = self.mod(temb)
        return out

    def forward(self, *carry: Tensor, rows: Rows, mod: Tensor, **constants: Tensor) -> tuple[Tensor, ...]:
        """Tokens of the joint stream [T, C], and mod [M, 3C] -> [T, C]."""
        (x,) = carry
        index = rows.index[JOINT]
        shift, scale, gate = mod.chunk(3, -1)
        read = norm(x, scale, shift, index, self.eps, (self.attn.to_qkv, self.proj_mlp))
        # what attention has to wait for comes while the other half is computed
        attended = self.attn.begin(read, rows)
        up = self.proj_mlp(read)
        halves = concat_gelu(attended().flatten(1), up, (self.proj_out,))
        return (gate_add(x, self.proj_out(halves), gate, index),)
