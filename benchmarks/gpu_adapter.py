"""Runs diffusers pipelines through the adapter on a GPU: attention backends, offload, quantisation, LoRA.

    python -m benchmarks.gpu_adapter [--results FOLDER] [--cases NAME,NAME] [--skip NAME,NAME] [--device cpu]

Every case runs in a process of its own, so that none can spoil the next, and so that its peak memory is its own. It
makes the same image as plain diffusers and says whether it is as it should be: that a backend was really chosen and
every step was reported, how far the pixels are from plain diffusers, that memory is lower where a setting is there to
lower it, and that a request after a cancelled one is what it was before. The table comes last.

The pipelines are a random FLUX with the head size of the real one and a text encoder that weighs something, and a tiny
Qwen-Image, in bfloat16. Times of so small models say nothing about real ones. `--device cpu` goes through the same
cases on tiny models, as far as they need no accelerator.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from diffusers import DiffusionPipeline, FluxPipeline
from safetensors.torch import save_file
from transformers import T5EncoderModel

from benchmarks import provenance
from omni_grpc import Draft, GuidanceDraft, Omni
from omni_grpc.config.command_line import Parser
from omni_grpc.types.errors import OmniError
from omni_grpc.types.events import StepProgress
from omni_grpc.types.lora import Lora
from omni_grpc.types.media import ImageFormat
from tools.tiny.images import build_flux, build_qwen_image, flux_parts

ROOT = Path(__file__).resolve().parent.parent
PROMPT, SIZE, STEPS, SEED, SCALE = "a red circle", 256, 6, 7, 3.5
CASE_SECONDS = 200
LORA = "style.safetensors"
MARK = "CASE "
"""Begins the line in which a case's process tells its row."""

Pixels = npt.NDArray[np.uint8]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is run, and what makes it well: pixels within `tolerance` of plain diffusers' at most and `mean` on average,
    of 255; a peak of `peak` times that of plain diffusers at most, weights of `weights` times. `refused` is what a
    refusal must say where one is well too, `refused_on_cpu` what it must say there. `plain` is a change to a pipeline
    of diffusers, in place of the adapter. With `lora` both have the same adapter on.
    """

    model: str = "flux"
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    plain: str = ""
    lora: bool = False
    tolerance: int = 1
    mean: float = 1.0
    peak: float = 0.0
    weights: float = 0.0
    refused: str = ""
    refused_on_cpu: str = ""

    @property
    def reference(self) -> str:
        """The name of the files of plain diffusers."""
        return f"{self.model}-lora" if self.lora else self.model


def _quantised(kind: str) -> dict[str, Any]:
    entry = {"class": "TorchAoConfig", "quant_type": {"class": kind}}
    return {"diffusers_load_kwargs": {"quantization_config": {"quant_mapping": {"transformer": entry}}}}


CASES: Mapping[str, Case] = {
    "plain": Case(plain="to"),
    "no backend asked for": Case(),
    "TORCH_SDPA": Case(settings={"diffusion_attention_backend": "TORCH_SDPA"}),
    "CUDNN_ATTN": Case(
        settings={"diffusion_attention_backend": "CUDNN_ATTN"},
        tolerance=16,
        refused_on_cpu="_native_cudnn: RuntimeError",
    ),
    "FLASH_ATTN": Case(
        settings={"diffusion_attention_backend": "FLASH_ATTN"}, tolerance=16, refused_on_cpu="flash: RuntimeError"
    ),
    # PyPI has version 1.0.6
    "SAGE_ATTN": Case(
        settings={"diffusion_attention_backend": "SAGE_ATTN"}, tolerance=32, mean=4.0, refused="sageattention>=2.1.1"
    ),
    "model CPU offload": Case(settings={"enable_cpu_offload": True}, peak=0.9, refused_on_cpu="needs an accelerator"),
    "layerwise offload": Case(settings={"enable_layerwise_offload": True}, peak=0.6),
    "layerwise offload without stream": Case(plain="group offload", peak=0.6),
    "torchao int8": Case(settings=_quantised("Int8WeightOnlyConfig"), tolerance=96, mean=8.0, weights=0.75),
    "torchao float8": Case(settings=_quantised("Float8WeightOnlyConfig"), tolerance=96, mean=8.0, weights=0.75),
    "plain LoRA": Case(plain="to", lora=True),
    "LoRA": Case(lora=True),
    "LoRA with model CPU offload": Case(
        lora=True, settings={"enable_cpu_offload": True}, peak=0.9, refused_on_cpu="needs an accelerator"
    ),
    "LoRA with layerwise offload": Case(lora=True, settings={"enable_layerwise_offload": True}, peak=0.6),
    "LoRA on torchao int8": Case(
        lora=True, settings=_quantised("Int8WeightOnlyConfig"), tolerance=96, mean=8.0, weights=0.75
    ),
    "plain Qwen-Image": Case(model="qwen_image", plain="to"),
    # its VAE is offloaded layer by layer
    "layerwise offload of Qwen-Image": Case(model="qwen_image", settings={"enable_layerwise_offload": True}),
}
"""The plain ones come before those that are compared with them."""

PLAIN = {case.reference: name for name, case in CASES.items() if case.plain == "to"}


def build(folder: Path, device: str) -> None:
    """The checkpoints: on a GPU one of about 420 million parameters, a quarter of them a text encoder's."""
    build_qwen_image(folder / "qwen_image", heads=2, head_dim=128)
    if device == "cpu":
        build_flux(folder / "flux")
        _build_lora(folder)
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        parts = flux_parts(heads=8, head_dim=128, layers=6)
        config = parts["text_encoder_2"].config
        config.num_layers, config.d_ff = 64, 8192
        parts["text_encoder_2"] = T5EncoderModel(config)
        pipeline = FluxPipeline(**parts)
    pipeline.to(torch.bfloat16).save_pretrained(folder / "flux")
    _build_lora(folder)


def _build_lora(folder: Path) -> None:
    """An adapter of rank 16 for the attention of the transformer and for the smaller text encoder."""
    random, tensors = torch.Generator().manual_seed(1), {}
    pipeline = DiffusionPipeline.from_pretrained(folder / "flux")
    for component, ends in (("transformer", ("to_q", "to_k", "to_v")), ("text_encoder", ("q_proj",))):
        for path, module in getattr(pipeline, component).named_modules():
            if path.endswith(ends):
                rows, columns = module.weight.shape
                name = f"{component}.{path}"
                tensors[f"{name}.lora_A.weight"] = torch.randn(16, columns, generator=random) / columns**0.5
                tensors[f"{name}.lora_B.weight"] = torch.randn(rows, 16, generator=random) / 4
    save_file(tensors, folder / LORA)


# --- one case, in a process of its own --------------------------------------------------------------------------------


def run_case(name: str, folder: Path, device: str) -> dict[str, Any]:
    """The row of one case. What goes wrong is its reason; nothing is raised."""
    case = CASES[name]
    try:
        row = _plain(case, folder, device) if case.plain else _adapted(case, folder, device)
        pixels = np.asarray(row.pop("pixels"), np.uint8)
        if case.plain == "to":
            np.save(folder / f"{case.reference}.npy", pixels)
            (folder / f"{case.reference}.json").write_text(json.dumps(row))
        reasons = _compare(case, row, pixels, folder)
    except OmniError as error:
        expected = case.refused_on_cpu if device == "cpu" and case.refused_on_cpu else case.refused
        row, well = {"refused": str(error)}, bool(expected) and expected in str(error)
        reasons = [] if well else [f"{error.reason}: {error}"]
    except Exception as error:  # noqa: BLE001 - a case that fails is a row of the table
        row, reasons = {}, [f"{type(error).__name__}: {error}"]
    return {"case": name, "ok": not reasons, "reason": "; ".join(reasons), **row}


def _compare(case: Case, row: dict[str, Any], pixels: Pixels, folder: Path) -> list[str]:
    """What is not as it should be; puts the differences into the row."""
    reference = np.load(folder / f"{case.reference}.npy").astype(int)
    plain = json.loads((folder / f"{case.reference}.json").read_text())
    difference = np.abs(pixels.astype(int) - reference)
    row |= {"max_pixel_difference": int(difference.max()), "mean_pixel_difference": float(difference.mean())}
    checks = {
        f"pixels differ by {difference.max()} at most": difference.max() <= case.tolerance,
        f"pixels differ by {difference.mean():.3f} on average": difference.mean() <= case.mean,
        f"{row['step_events']} step events of {row['steps']}": row["step_events"] == row["steps"],
        "another image after a cancelled request": row.get("same_after_cancel", True),
    }
    for what, most in (("peak_memory_bytes", case.peak), ("weight_bytes", case.weights)):
        if most and plain[what] and row[what]:
            share = row[what] / plain[what]
            row[what.replace("_bytes", "_share")] = round(share, 3)
            checks[f"{what} is {share:.2f} of plain diffusers'"] = share <= most
    return [what for what, well in checks.items() if not well]


def _plain(case: Case, folder: Path, device: str) -> dict[str, Any]:
    """The image that diffusers makes by itself."""
    pipeline = DiffusionPipeline.from_pretrained(folder / case.model, dtype=_dtype(device))
    pipeline.set_progress_bar_config(disable=True)
    if case.lora:
        pipeline.load_lora_weights(folder / LORA)
    if case.plain == "to":
        pipeline.to(device)
    else:
        where = {"onload_device": torch.device(device), "offload_device": torch.device("cpu")}
        pipeline.enable_group_offload(**where, offload_type="block_level", num_blocks_per_group=1, use_stream=False)
    arguments = {"guidance_scale": SCALE} if case.model == "flux" else {}
    steps: list[int] = []
    for _ in range(2):
        _reset_peak()
        steps.clear()
        image = pipeline(
            PROMPT, width=SIZE, height=SIZE, num_inference_steps=STEPS,
            generator=torch.Generator().manual_seed(SEED),
            callback_on_step_end=lambda pipe, step, timestep, values: steps.append(step) or {}, **arguments,
        ).images[0]  # fmt: skip
    modules = [part for part in pipeline.components.values() if isinstance(part, torch.nn.Module)]
    return {
        "pixels": np.asarray(image),
        "step_events": len(steps),
        "steps": STEPS,
        "peak_memory_bytes": _peak(),
        "weight_bytes": sum(p.numel() * p.element_size() for module in modules for p in module.parameters()),
    }


def _adapted(case: Case, folder: Path, device: str) -> dict[str, Any]:
    """The same image through the adapter, after a warm-up and once more after a cancelled request."""
    guidance = GuidanceDraft(scale=SCALE) if case.model == "flux" else GuidanceDraft()
    draft = Draft(
        model="it", prompt=PROMPT, width=SIZE, height=SIZE, steps=STEPS, seeds=(SEED,), guidance=guidance,
        output_format=ImageFormat.PNG, loras=(Lora(lora_id="style"),) if case.lora else (),
    )  # fmt: skip
    settings = {**case.settings, **({"lora": {"style": str(folder / LORA)}} if case.lora else {})}
    with Omni(
        str(folder / case.model),
        served_model_name="it",
        diffusion_load_format="diffusers",
        device=device,
        dtype=str(_dtype(device)).removeprefix("torch."),
        **settings,
    ) as omni:
        omni.run(draft)
        _reset_peak()
        events: list[Any] = []
        result = omni.run(draft, on_event=events.append)
        peak = _peak()
        for event in omni.stream(dataclasses.replace(draft, prompt="a blue square")):
            if isinstance(event, StepProgress) and event.step == 2:
                break
        again = omni.run(draft)
        ready = omni._engine.ready
        assert ready is not None
    return {
        "pixels": np.asarray(result.images[0]),
        "attention_backend": result.effective.attention_backend,
        "step_events": sum(isinstance(event, StepProgress) for event in events),
        "steps": result.effective.steps,
        "same_after_cancel": again.files == result.files,
        "denoise_seconds": round(result.stats.denoise, 4),
        "peak_memory_bytes": peak,
        "weight_bytes": ready.weight_bytes,
        "warnings": [warning.code for warning in result.warnings],
    }


def _dtype(device: str) -> torch.dtype:
    return torch.float32 if device == "cpu" else torch.bfloat16


def _reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def _peak() -> int:
    """Most bytes that torch held on the GPU since the reset; 0 where there is none."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


# --- all of them ------------------------------------------------------------------------------------------------------


def run_all(
    names: Sequence[str], folder: Path, device: str, keep: Callable[[list[dict[str, Any]]], None]
) -> list[dict[str, Any]]:
    """A row for each case, whatever becomes of its process; `keep` gets all rows so far, should no other come."""
    rows: list[dict[str, Any]] = []
    for name in names:
        command = [sys.executable, "-m", "benchmarks.gpu_adapter", "--device", device, "--one", name, str(folder)]
        print(f"--- {name}", flush=True)
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=CASE_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            row = {"case": name, "ok": False, "reason": f"took more than {CASE_SECONDS} s"}
        else:
            told = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
            end = " | ".join(done.stderr.strip().splitlines()[-3:])
            died = {"case": name, "ok": False, "reason": f"its process ended with {done.returncode}: {end}"}
            row = json.loads(told[-1]) if told else died
        print(json.dumps(row), flush=True)
        rows.append(row)
        keep(rows)
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows for people: what is there in each, in columns."""
    columns = {
        "case": "case", "ok": "ok", "attention_backend": "attention", "step_events": "steps",
        "max_pixel_difference": "max diff", "mean_pixel_difference": "mean diff", "peak_memory_bytes": "peak MiB",
        "weight_bytes": "weights MiB", "same_after_cancel": "after cancel", "denoise_seconds": "seconds",
    }  # fmt: skip
    lines = [list(columns.values())]
    for row in rows:
        cells = []
        for name in columns:
            value = row.get(name, "")
            if name.endswith("_bytes"):
                value = round(value / 2**20) if value else ""
            cells.append(f"{value:.3f}" if isinstance(value, float) else str(value))
        lines.append(cells)
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    notes = [f"{row['case']}: {row.get('reason') or row.get('refused')}" for row in rows if _note(row)]
    return "\n".join([*text, "", *notes])


def _note(row: Mapping[str, Any]) -> bool:
    return bool(row.get("reason") or row.get("refused"))


def _cases(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if unknown := [name for name in names if name not in CASES]:
        raise argparse.ArgumentTypeError(f"there is no case {unknown[0]!r}")
    return names


def main() -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("--results", type=Path, help="folder for the record (default: benchmarks/results, on a GPU)")
    parser.add_argument("--cases", type=_cases, default=tuple(CASES), help=f"some of: {', '.join(CASES)}")
    parser.add_argument("--skip", type=_cases, default=(), help="all but these")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--one", nargs=2, metavar=("CASE", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        name, folder = args.one
        print(MARK + json.dumps(run_case(name, Path(folder), args.device)), flush=True)
        return 0
    asked = [name for name in args.cases if name not in args.skip]
    needed = {PLAIN[CASES[name].reference] for name in asked}
    names = [name for name in CASES if name in needed or name in asked]
    card = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    results = args.results or (ROOT / "benchmarks" / "results" if args.device == "cuda" else None)

    def keep(rows: list[dict[str, Any]]) -> None:
        if results is None:
            return
        record = {
            **provenance.about("benchmarks/gpu_adapter.py"),
            "rows": rows,
        }
        results.mkdir(parents=True, exist_ok=True)
        name = re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-")
        (results / f"{name}-adapter.json").write_text(json.dumps(record, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder), args.device)
        rows = run_all(names, Path(folder), args.device, keep)
    print(f"\n{card}, torch {torch.__version__}\n\n{table(rows)}")
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
