"""The transformer of Helios: the blocks of Wan over the tokens of a chunk and of its history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omni_grpc.models.helios import CHUNK, HISTORY, LONG, MID, PATCH, SHORT
from omni_grpc.nn.cross_dit import ConditionEmbedder, CrossDiTBlock, CrossDitSelfAttention, text_constants
from omni_grpc.nn.dual_stream import IMG, TXT
from omni_grpc.nn.linear import Linear
from omni_grpc.nn.per_head import PerHead
from omni_grpc.nn.query_key import Projected, norm_rope
from omni_grpc.nn.rope import rope_table
from omni_grpc.nn.row_changes import table_of
from omni_grpc.nn.rows import JOINT, Row, Rows
from omni_grpc.nn.stack import Stack
from omni_grpc.ops.norm import norm_modulate
from omni_grpc.pipeline.patches import Grid

SCALES: Mapping[str, int] = {LONG: 4, MID: 2, SHORT: 1}
"""The size of a token of the history: in latent frames, and in patches of height and width."""

MAX_KEY_SCALE = 10.0


class HistoryAttention(CrossDitSelfAttention):
    """Self attention in which the keys of the history are scaled by a learned factor of 1 to 10 per head.

    "past" [T_joint] is bound to the rows: which tokens belong to the history.
    """

    def __init__(self, num_heads: int, head_size: int, eps: float, *, scales: int) -> None:
        super().__init__(num_heads * head_size, num_heads, head_size, eps, JOINT)
        self.history_key_scale = PerHead(scales)

    def attend(self, part: Projected, rows: Rows) -> Tensor:
        q, k, v = norm_rope(part, rows["rope"], self.stream)
        scale = 1 + torch.sigmoid(self.history_key_scale()) * (MAX_KEY_SCALE - 1)
        per_token = torch.where(rows["past"][:, None], scale, 1.0)[..., None]
        out: Tensor = self.attention(q, (k * per_token).to(k.dtype), v, rows, over=self.stream)
        return out


class HeliosTransformer(nn.Module):
    """Predicts the velocity of the tokens of one chunk.

    A row has the streams "long", "mid", "short" (the history) and "img" (the chunk), which attend to each other, and
    "txt" aside. What no step of a chunk changes is bound to the rows: the tokens of the history under the names of its
    streams, "rope" [T_joint, D / 2, 2], "past" [T_joint], "text_k" and "text_v" [T_txt, blocks, H, D]. "blocks"
    [M, 1, 6C] and "final" [M, 2C] come with the timestep; the history is at level 1, where it is always 0.
    """

    row_parameters = ("scale_shift_table",)

    def __init__(
        self,
        *,
        num_layers: int,
        num_heads: int,
        head_size: int,
        ff_channels: int,
        text_channels: int,
        frequencies: int,
        in_channels: int,
        out_channels: int,
        axes: Sequence[int],
        theta: float,
        eps: float,
        key_scales: int,
    ) -> None:
        super().__init__()
        channels, patch = num_heads * head_size, in_channels * PATCH**2
        self.axes, self.theta, self.eps = tuple(axes), theta, eps
        self.patch_embedding = Linear(patch, channels, stream=IMG)
        self.patch_short = Linear(patch * SCALES[SHORT] ** 3, channels, stream=SHORT)
        self.patch_mid = Linear(patch * SCALES[MID] ** 3, channels, stream=MID)
        self.patch_long = Linear(patch * SCALES[LONG] ** 3, channels, stream=LONG)
        self.condition_embedder = ConditionEmbedder(channels, frequencies=frequencies, text_channels=text_channels)
        blocks = [CrossDiTBlock(num_heads, head_size, ff_channels, eps, stream=JOINT) for _ in range(num_layers)]
        if key_scales:
            for block in blocks:
                block.attn1 = HistoryAttention(num_heads, head_size, eps, scales=key_scales)
        self.stack = Stack(blocks=blocks)
        self.scale_shift_table = nn.Parameter(torch.zeros(1, 2, channels))
        self.proj_out = Linear(channels, out_channels * PATCH**2, stream=IMG)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """From the checkpoint's own transformer config."""
        heads = config["num_attention_heads"]
        scales = {"per_head": heads, "scalar": 1}[config["history_scale_mode"]] if config["is_amplify_history"] else 0
        return cls(
            num_layers=config["num_layers"],
            num_heads=heads,
            head_size=config["attention_head_dim"],
            ff_channels=config["ffn_dim"],
            text_channels=config["text_dim"],
            frequencies=config["freq_dim"],
            in_channels=config["in_channels"],
            out_channels=config["out_channels"] or config["in_channels"],
            axes=config["rope_dim"],
            theta=config["rope_theta"],
            eps=config["eps"],
            key_scales=scales,
        )

    @staticmethod
    def row(text_tokens: int, height: int, width: int) -> Row:
        """The lengths of a sequence; height and width in tokens."""
        past = {name: ((1, _history_grid(name, height, width).tokens),) for name in HISTORY}
        return Row.of(aside=(TXT,), txt=text_tokens, **past, img=CHUNK * height * width)

    def text(self, embeds: Tensor) -> dict[str, tuple[str, Tensor]]:
        """Hidden states of the text encoder [T_txt, text_channels] -> keys and values of every block, as constants."""
        blocks = cast(Sequence[CrossDiTBlock], self.stack.group("blocks"))
        return text_constants(blocks, self.condition_embedder.text_embedder(embeds))

    def history(self, first: Tensor, last: Tensor) -> dict[str, tuple[str, Tensor]]:
        """Constants: the tokens of the history.

        first: the first latent frame of the video, [C, 1, h, w]. last: the ones before the chunk, [C, sum(HISTORY), h,
        w].
        """
        frames = dict(zip(HISTORY, last.split(list(HISTORY.values()), 1), strict=True))
        frames[SHORT] = torch.cat([first, frames[SHORT]], 1)
        height, width = (size // PATCH for size in last.shape[-2:])
        tokens = {}
        for name, x in frames.items():
            patches = _history_grid(name, height, width).pack(_pad_to_tokens(x, name, PATCH))
            tokens[name] = (name, self.get_submodule(f"patch_{name}")(patches))
        return tokens

    def positions(self, height: int, width: int) -> dict[str, tuple[str, Tensor]]:
        """Constants: the RoPE tables of a row, and which of its tokens belong to the history. Sizes in tokens.

        Frames are counted as if the history followed the first frame of the video. A coarse token has the mean of the
        tables of what it covers.
        """
        device = self.proj_out.weight.device
        start, tables = 1, {}
        for name, frames in (*HISTORY.items(), (IMG, CHUNK)):
            t = torch.arange(start, start + frames, device=device)
            start += frames
            if name == SHORT:
                t = torch.cat([t.new_zeros(1), t])
            table = self._rope_table(t, height, width)
            if SCALES.get(name, 1) > 1:
                table = F.avg_pool3d(_pad_to_tokens(table, name), SCALES[name])
            tables[name] = table.flatten(1).T.unflatten(1, (-1, 2))
        past = torch.cat([torch.full((len(x),), name != IMG, device=device) for name, x in tables.items()])
        return {"rope": (JOINT, torch.cat([*tables.values()])), "past": (JOINT, past)}

    def modulation(self, t: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """Timesteps float32 [S] in the scheduler's units -> modulation vectors by name, [S, 2, ...] each: for the
        chunk, and for the history at timestep 0. dtype: of the tokens.
        """
        temb, shared = self.condition_embedder.time(torch.cat([t, t.new_zeros(1)]), dtype)
        vectors = {
            **self.stack.modulation(shared),
            "final": (table_of(self, "scale_shift_table") + temb[:, None]).flatten(1),
        }
        return {name: torch.stack([x[:-1], x[-1:].expand_as(x[:-1])], 1) for name, x in vectors.items()}

    def forward(self, latents: Tensor, rows: Rows) -> Tensor:
        """[T_img, in_channels * 4] -> [T_img, out_channels * 4], channel first in both."""
        carry = {name: rows[name] for name in HISTORY} | {IMG: self.patch_embedding(latents)}
        img = self.stack(carry, rows)[IMG]
        shift, scale = rows["final"].chunk(2, -1)
        patches = self.proj_out(norm_modulate(img, scale, shift, rows.index[IMG], self.eps))
        # proj_out orders values channel last; tokens are channel first
        out: Tensor = patches.unflatten(-1, (PATCH**2, -1)).transpose(1, 2).flatten(1)
        return out

    def _rope_table(self, t: Tensor, height: int, width: int) -> Tensor:
        """RoPE table of a grid, channel first: [D, frames, height, width]."""
        y, x = (torch.arange(size, device=t.device) for size in (height, width))
        angles = rope_table(torch.cartesian_prod(t, y, x), self.axes, self.theta)
        table: Tensor = angles.flatten(1).T.unflatten(1, (len(t), height, width))
        return table


def _history_grid(name: str, height: int, width: int) -> Grid:
    """The grid of a stream of the history. Height and width: of the chunk, in tokens."""
    scale = SCALES[name]
    frames = HISTORY[name] + (name == SHORT)
    return Grid(
        frames=-(-frames // scale),
        height=-(-height // scale),
        width=-(-width // scale),
        depth=scale,
        patch=scale * PATCH,
    )


def _pad_to_tokens(x: Tensor, name: str, patch: int = 1) -> Tensor:
    """x [C, frames, h, w], padded by repeating its last values to whole tokens of a stream of the history."""
    scale = SCALES[name]
    frames, height, width = -x.shape[1] % scale, -x.shape[2] % (scale * patch), -x.shape[3] % (scale * patch)
    return F.pad(x[None], (0, width, 0, height, 0, frames), mode="replicate")[0]
