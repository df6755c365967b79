"""Custom ops: one schema, one reference and the kernels for each. docs/adding-an-op.md says how to add one."""

from omni_grpc.ops import (
    attention,
    attention_cpu,
    attention_q,
    cache,
    dequant,
    gemm,
    heads,
    image,
    norm,
    quant,
    rope,
    rope_heads,
    rope_tiles,
    step,
)
from omni_grpc.ops.library import NativeLibrary, kernels, load_native

load_native()

__all__ = [
    "NativeLibrary",
    "attention",
    "attention_cpu",
    "attention_q",
    "cache",
    "dequant",
    "gemm",
    "heads",
    "image",
    "kernels",
    "load_native",
    "norm",
    "quant",
    "rope",
    "rope_heads",
    "rope_tiles",
    "step",
]
