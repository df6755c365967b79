"""The transformer and the text encoder as they are trained: padded batches and plain torch, with the parameter names of
the checkpoint, so that their weights load into diffusers, transformers and our own modules as they are.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omni_grpc.models.qwen_image.qwen_image_transformer import QwenImageTransformer
from tools.train_demo.words import PREFIX_TOKENS

HEADS, HEAD, LAYERS = 4, 32, 6
CHANNELS = HEADS * HEAD
AXES = (8, 12, 12)
TEXT_CHANNELS, TEXT_LAYERS, TEXT_HIDDEN, KEY_HEADS = 128, 3, 256, 2
TEXT_THETA = 10_000.0
EPS = 1e-6


# The elementwise parts, each in as few passes as eager torch has: so small a model is bound by them. Autocast is off
# inside, since it would have norms write float32.


def _rotate(x: Tensor, weight: Tensor, turns: Tensor) -> Tensor:
    """RMSNorm over the last dimension of x [B, T, 2, H, D], by weight [T, 2, 1, D], then a turn of interleaved pairs by
    cosines and sines [T, 1, 1, D / 2, 2].
    """
    with torch.autocast(x.device.type, enabled=False):
        normed = F.rms_norm(x, x.shape[-1:], eps=EPS) * weight
    pairs = normed.float().unflatten(-1, (-1, 2))
    if torch.compiler.is_compiling():
        # the compiler leaves complex numbers as they are, and makes one pass of the whole without them
        (a, b), (cos, sin) = pairs.unbind(-1), turns.unbind(-1)
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2).to(x.dtype)
    return torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(turns)).flatten(-2).to(x.dtype)


def _rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A turn of the pairs (i, i + D / 2) of x [B, T, H, D]."""
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return F.rms_norm(x, weight.shape, weight.to(x.dtype), EPS)


def _normed(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """LayerNorm without affine, modulated."""
    with torch.autocast(x.device.type, enabled=False):
        return torch.addcmul(shift, F.layer_norm(x, x.shape[-1:], eps=EPS), 1 + scale)


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"):
            self.add_module(name, nn.Linear(CHANNELS, CHANNELS))
        self.to_out = nn.ModuleList([nn.Linear(CHANNELS, CHANNELS), nn.Identity()])
        for name in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
            self.add_module(name, nn.RMSNorm(HEAD, eps=EPS))

    def forward(self, img: Tensor, txt: Tensor, rope: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        joint = torch.cat(
            [
                _together(txt, self.add_q_proj, self.add_k_proj, self.add_v_proj),
                _together(img, self.to_q, self.to_k, self.to_v),
            ],
            1,
        )
        qk, v = joint.unflatten(-1, (3, HEADS, HEAD)).split((2, 1), 2)
        text, image = (
            torch.stack([q.weight, k.weight])[None, :, None]
            for q, k in ((self.norm_added_q, self.norm_added_k), (self.norm_q, self.norm_k))
        )
        weight = torch.cat([text.expand(txt.shape[1], -1, -1, -1), image.expand(img.shape[1], -1, -1, -1)])
        q, k = _rotate(qk, weight, rope[:, None, None]).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v[:, :, 0].transpose(1, 2), attn_mask=mask)
        text, image = out.transpose(1, 2).flatten(2).split([txt.shape[1], img.shape[1]], 1)
        return self.to_out[0](image), self.to_add_out(text)


def _together(x: Tensor, *layers: nn.Module) -> Tensor:
    """Several linear layers of one input in one product."""
    weights, biases = zip(*((layer.weight, layer.bias) for layer in layers), strict=True)
    return F.linear(x, torch.cat(weights), torch.cat(biases))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        up = nn.Module()
        up.proj = nn.Linear(CHANNELS, 4 * CHANNELS)
        self.net = nn.ModuleList([up, nn.Identity(), nn.Linear(4 * CHANNELS, CHANNELS)])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net[2](_gelu(self.net[0].proj(x)))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.img_mod = nn.Sequential(nn.SiLU(), nn.Linear(CHANNELS, 6 * CHANNELS))
        self.txt_mod = nn.Sequential(nn.SiLU(), nn.Linear(CHANNELS, 6 * CHANNELS))
        self.attn = Attention()
        self.img_mlp, self.txt_mlp = FeedForward(), FeedForward()

    def forward(self, img: Tensor, txt: Tensor, temb: Tensor, rope: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        img_mod = self.img_mod(temb)[:, None].chunk(6, -1)
        txt_mod = self.txt_mod(temb)[:, None].chunk(6, -1)
        img_out, txt_out = self.attn(_normed(img, *img_mod[:2]), _normed(txt, *txt_mod[:2]), rope, mask)
        img, txt = torch.addcmul(img, img_mod[2], img_out), torch.addcmul(txt, txt_mod[2], txt_out)
        img = torch.addcmul(img, img_mod[5], self.img_mlp(_normed(img, *img_mod[3:5])))
        txt = torch.addcmul(txt, txt_mod[5], self.txt_mlp(_normed(txt, *txt_mod[3:5])))
        return img, txt


class Transformer(nn.Module):
    """Velocity of the latents' tokens [B, N, 64]."""

    def __init__(self) -> None:
        super().__init__()
        self.txt_norm = nn.RMSNorm(TEXT_CHANNELS, eps=EPS)
        self.img_in, self.txt_in = nn.Linear(64, CHANNELS), nn.Linear(TEXT_CHANNELS, CHANNELS)
        embedder = nn.Module()
        embedder.linear_1, embedder.linear_2 = nn.Linear(256, CHANNELS), nn.Linear(CHANNELS, CHANNELS)
        self.time_text_embed = nn.Module()
        self.time_text_embed.timestep_embedder = embedder
        self.transformer_blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm_out = nn.Module()
        self.norm_out.linear = nn.Linear(CHANNELS, 2 * CHANNELS)
        self.proj_out = nn.Linear(CHANNELS, 64)
        self._begin()

    def _begin(self) -> None:
        """Blocks begin as the identity, the output as nothing (https://arxiv.org/abs/2212.09748, section 3.2)."""
        for block in self.transformer_blocks:
            for modulation in (block.img_mod, block.txt_mod):
                nn.init.zeros_(modulation[1].weight)
                nn.init.zeros_(modulation[1].bias)
        for layer in (self.norm_out.linear, self.proj_out):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, latents: Tensor, t: Tensor, text: Tensor, rope: Tensor, mask: Tensor) -> Tensor:
        """t [B] in 0..1; text [B, L, C]; rope [L + N, D / 2, 2]; mask [B, 1, 1, L + N], True where there is a token."""
        exponents = -math.log(10_000) * torch.arange(128, device=t.device) / 128
        angles = 1000 * t[:, None].float() * exponents.exp()
        embedder = self.time_text_embed.timestep_embedder
        temb = embedder.linear_2(F.silu(embedder.linear_1(torch.cat([angles.cos(), angles.sin()], -1))))
        img, txt = self.img_in(latents), self.txt_in(_rms(text, self.txt_norm.weight))
        for block in self.transformer_blocks:
            img, txt = block(img, txt, temb, rope, mask)
        scale, shift = self.norm_out.linear(F.silu(temb))[:, None].chunk(2, -1)
        out: Tensor = self.proj_out(_normed(img, shift, scale))
        return out


def rope(text: int, height: int, width: int) -> Tensor:
    """Our own tables, with height and width in tokens of 2 x 2 latents."""
    with torch.device("meta"):
        module = QwenImageTransformer(
            num_layers=0, num_heads=HEADS, head_size=HEAD, text_channels=8, in_channels=8, out_channels=8, axes=AXES
        )
    module.proj_out.to_empty(device="cpu")
    return module.rope(text, height, width)


class TextLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(TEXT_CHANNELS, eps=EPS)
        self.post_attention_layernorm = nn.RMSNorm(TEXT_CHANNELS, eps=EPS)
        self.self_attn, self.mlp = nn.Module(), nn.Module()
        inner, keys = HEADS * HEAD, KEY_HEADS * HEAD
        self.self_attn.q_proj = nn.Linear(TEXT_CHANNELS, inner)
        self.self_attn.k_proj, self.self_attn.v_proj = (nn.Linear(TEXT_CHANNELS, keys) for _ in range(2))
        self.self_attn.o_proj = nn.Linear(inner, TEXT_CHANNELS, bias=False)
        self.mlp.gate_proj, self.mlp.up_proj = (nn.Linear(TEXT_CHANNELS, TEXT_HIDDEN, bias=False) for _ in range(2))
        self.mlp.down_proj = nn.Linear(TEXT_HIDDEN, TEXT_CHANNELS, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h, attn = _rms(x, self.input_layernorm.weight), self.self_attn
        qkv = _together(h, attn.q_proj, attn.k_proj, attn.v_proj).unflatten(-1, (-1, HEAD))
        qk, v = qkv.split((HEADS + KEY_HEADS, KEY_HEADS), 2)
        q, k = _rotate_half(qk, cos, sin).split((HEADS, KEY_HEADS), 2)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + attn.o_proj(out.transpose(1, 2).flatten(2))
        h = _rms(x, self.post_attention_layernorm.weight)
        out = self.mlp.down_proj(F.silu(self.mlp.gate_proj(h)) * self.mlp.up_proj(h))
        return x + out


class TextEncoder(nn.Module):
    """The language model of Qwen2.5-VL without its head: ids [B, T] -> the hidden states after the prefix."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, TEXT_CHANNELS)
        nn.init.normal_(self.embed_tokens.weight, std=0.5)
        self.layers = nn.ModuleList([TextLayer() for _ in range(TEXT_LAYERS)])
        self.norm = nn.RMSNorm(TEXT_CHANNELS, eps=EPS)

    def forward(self, ids: Tensor) -> Tensor:
        frequencies = TEXT_THETA ** (-torch.arange(0, HEAD, 2, device=ids.device) / HEAD)
        angles = torch.arange(ids.shape[1], device=ids.device)[:, None] * frequencies
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        x = self.embed_tokens(ids)
        if torch.is_autocast_enabled(ids.device.type):
            x = x.to(torch.get_autocast_dtype(ids.device.type))
        for layer in self.layers:
            x = layer(x, cos, sin)
        out: Tensor = _rms(x, self.norm.weight)[:, PREFIX_TOKENS:]
        return out


def text_config(vocabulary: int, special: dict[str, int]) -> dict[str, Any]:
    """The text part of the config of Qwen2.5-VL that goes with TextEncoder."""
    return {
        "vocab_size": vocabulary,
        "hidden_size": TEXT_CHANNELS,
        "intermediate_size": TEXT_HIDDEN,
        "num_hidden_layers": TEXT_LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "max_position_embeddings": 4096,
        "rms_norm_eps": EPS,
        "rope_parameters": {"rope_type": "default", "rope_theta": TEXT_THETA, "mrope_section": [4, 6, 6]},
        "bos_token_id": special["<|endoftext|>"],
        "eos_token_id": special["<|im_end|>"],
        "pad_token_id": special["<|endoftext|>"],
    }
