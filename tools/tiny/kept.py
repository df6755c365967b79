"""A tiny Qwen-Image with random weights, built once and kept, for those who look at how and not at what is drawn."""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = ROOT / ".demo" / "qwen_image"


def kept_checkpoint() -> Path:
    """Builds it where it is missing or older than the code that makes it."""
    builder = ROOT / "tools" / "tiny" / "images.py"
    if CHECKPOINT.is_dir() and CHECKPOINT.stat().st_mtime >= builder.stat().st_mtime:
        return CHECKPOINT
    from tools.tiny.images import build_qwen_image  # here, since it takes seconds to load what it is made with

    print(f"building a tiny checkpoint with random weights in {CHECKPOINT.relative_to(ROOT)}", flush=True)
    partial = CHECKPOINT.with_name(CHECKPOINT.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    build_qwen_image(partial)
    partial.touch()  # its time is compared with that of the builder
    shutil.rmtree(CHECKPOINT, ignore_errors=True)
    return partial.rename(CHECKPOINT)
