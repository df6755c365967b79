"""Makes a state to train on from out of a checkpoint that `export` made, and of the record of its training.

    python -m tools.train_demo.unpack omni_grpc/demo tools/train_demo/record.json STATE

The optimiser begins anew, and the VAE is the one in float16; nothing else is lost.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2_5_VLForConditionalGeneration

from omni_grpc.config.command_line import Parser


def unpack(folder: Path, record: Path, state: Path) -> None:
    state.mkdir(parents=True, exist_ok=True)
    text = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder / "text_encoder", dtype=torch.bfloat16)
    parts = {
        "text_encoder": text.model.language_model.state_dict(),
        "transformer": load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors"),
    }
    weights = {f"{part}.{name}": x.contiguous() for part, tensors in parts.items() for name, x in tensors.items()}
    for name in ("average", "parameters"):
        save_file(weights, state / f"{name}.safetensors")
    vae = load_file(folder / "vae" / "diffusion_pytorch_model.safetensors")
    save_file({name: x.float() for name, x in vae.items()}, state / "vae.safetensors")
    shutil.copyfile(record, state / "log.json")


if __name__ == "__main__":
    parser = Parser(description=__doc__)
    for name in ("folder", "record", "state"):
        parser.add_argument(name, type=Path)
    args = parser.parse_args()
    unpack(args.folder, args.record, args.state)
