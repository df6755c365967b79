"""Packs the denoiser of a checkpoint into a GGUF file, to see what a type does to a model.

    python -m tools.pack_gguf CHECKPOINT FILE.gguf [--type Q8_0] [--component transformer]

Matrices of the blocks get the type, all else stays in float32. Types are those that the gguf package can pack, which no
K-quants are: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, BF16, F16.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import safetensors.torch
import torch

from omni_grpc.config.command_line import Parser
from omni_grpc.loading.checkpoint import WEIGHT_FILE


def pack(checkpoint: Path, file: Path, kind: gguf.GGMLQuantizationType, component: str = "transformer") -> int:
    """Writes the file and returns how many matrices it has in that type. Its names are the checkpoint's."""
    weights = safetensors.torch.load_file(checkpoint / component / WEIGHT_FILE)
    group = gguf.GGML_QUANT_SIZES[kind][0]
    # no architecture: a name of one is for the names of its first publication
    writer = gguf.GGUFWriter(file, "")
    packed = 0
    for name, tensor in weights.items():
        fits = tensor.dim() == 2 and "blocks." in name and tensor.shape[1] % group == 0
        of = kind if fits else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(tensor.to(torch.float32).numpy(), of), raw_dtype=of)
        packed += fits
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return packed


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--type", default="Q8_0", choices=["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "F16"])
    parser.add_argument("--component", default="transformer")
    args = parser.parse_args()
    count = pack(args.checkpoint, args.file, gguf.GGMLQuantizationType[args.type], args.component)
    print(f"{args.file}: {args.file.stat().st_size:,} bytes, {count} matrices in {args.type}")


if __name__ == "__main__":
    main()
