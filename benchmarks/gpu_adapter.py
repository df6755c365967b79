"""Runs a diffusers pipeline through the adapter on a GPU, under each attention backend, and shows its step events.

    python -m benchmarks.gpu_adapter [--results FOLDER]

The pipeline is a tiny random FLUX with the head size of the real one, in bfloat16. What is shown is that a backend was
really chosen, that every step is reported, and how far the pixels are from plain diffusers; times of so small a model
say nothing about a real one.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline

from omni_grpc import Draft, GuidanceDraft, Omni
from omni_grpc.request import Done, Encoded, ImageFormat, Started, Step
from tools.tiny.images import build_flux

ROOT = Path(__file__).resolve().parent.parent

BACKENDS = (None, "TORCH_SDPA", "CUDNN_ATTN", "FLASH_ATTN")
PROMPT, SIZE, STEPS, SEED, SCALE = "a red circle", 256, 6, 7, 3.5


def plain(folder: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The image that diffusers makes by itself."""
    pipeline = DiffusionPipeline.from_pretrained(folder, dtype=torch.bfloat16).to("cuda")
    pipeline.set_progress_bar_config(disable=True)
    image = pipeline(
        PROMPT, width=SIZE, height=SIZE, num_inference_steps=STEPS, guidance_scale=SCALE,
        generator=[torch.Generator().manual_seed(SEED)],
    ).images[0]  # fmt: skip
    return np.asarray(image)


def run(folder: Path, backend: str | None, reference: np.ndarray[Any, Any]) -> dict[str, Any]:
    """One generation through the adapter: prints its events, returns what is to be kept."""
    settings = {} if backend is None else {"diffusion_attention_backend": backend}
    draft = Draft(
        model="flux", prompt=PROMPT, width=SIZE, height=SIZE, steps=STEPS, seeds=(SEED,),
        guidance=GuidanceDraft(scale=SCALE), output_format=ImageFormat.PNG,
    )  # fmt: skip
    print(f"\n--- {backend or 'no backend asked for'}")
    with Omni(
        str(folder),
        served_model_name="flux",
        diffusion_load_format="diffusers",
        device="cuda",
        dtype="bfloat16",
        **settings,
    ) as omni:
        omni.run(draft)
        events = []
        result = omni.run(draft, on_event=events.append)
    for event in events:
        if isinstance(event, Started | Encoded | Step | Done):
            print(f"{type(event).__name__:8} {_tell(event)}")
    pixels = np.abs(np.asarray(result.images[0]).astype(int) - reference.astype(int))
    return {
        "asked": backend,
        "attention_backend": result.effective.attention_backend,
        "step_events": sum(isinstance(event, Step) for event in events),
        "steps": result.effective.steps,
        "max_pixel_difference": int(pixels.max()),
        "mean_pixel_difference": float(pixels.mean()),
        "denoise_seconds": result.stats.denoise,
        "warnings": [warning.code for warning in result.warnings],
    }


def _tell(event: Any) -> str:
    if isinstance(event, Step):
        return f"{event.step}/{event.total}  sigma {event.sigma:.3f}  {1000 * event.step_time:.1f} ms"
    if isinstance(event, Done):
        return f"attention {event.effective.attention_backend}, {event.effective.steps} steps"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    card = torch.cuda.get_device_name()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = build_flux(Path(folder) / "flux", heads=4, head_dim=128)
        reference = plain(checkpoint)
        rows = []
        for backend in BACKENDS:
            try:
                rows.append(run(checkpoint, backend, reference))
            except Exception as error:  # noqa: BLE001 - a backend that cannot be had is a row of the table
                rows.append({"asked": backend, "error": f"{type(error).__name__}: {error}"})
    print(f"\n{card}, torch {torch.__version__}")
    for row in rows:
        print(row)
    record = {
        "script": "benchmarks/gpu_adapter.py",
        "card": card,
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "rows": rows,
    }
    name = re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-")
    args.results.mkdir(parents=True, exist_ok=True)
    (args.results / f"{name}-adapter.json").write_text(json.dumps(record, indent=1) + "\n")
    failed = [row for row in rows if "error" in row or row["step_events"] != row["steps"]]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
