"""The configs of published denoisers, as diffusers has them."""

QWEN = {
    "patch_size": 2,
    "in_channels": 64,
    "out_channels": 16,
    "num_layers": 60,
    "num_attention_heads": 24,
    "attention_head_dim": 128,
    "joint_attention_dim": 3584,
    "axes_dims_rope": (16, 56, 56),
}
FLUX = {
    "in_channels": 64,
    "num_layers": 19,
    "num_single_layers": 38,
    "num_attention_heads": 24,
    "attention_head_dim": 128,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "guidance_embeds": True,
}
WAN = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 40,
    "attention_head_dim": 128,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 4096,
    "freq_dim": 256,
    "ffn_dim": 13824,
    "num_layers": 40,
    "cross_attn_norm": True,
    "eps": 1e-6,
}
