"""The builders of tiny checkpoints: what they make must not depend on the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tools.tiny_checkpoints import BUILDERS

ROOT = Path(__file__).resolve().parents[2]


def test_a_tiny_checkpoint_is_the_same_in_every_process(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from tools.tiny_checkpoints import BUILDERS
for family, build in BUILDERS.items():
    build(Path({str(tmp_path / "there")!r}) / family)
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
    for family, build in BUILDERS.items():
        here = build(tmp_path / "here" / family)
        files = [file.relative_to(here) for file in here.rglob("*") if file.is_file()]
        assert len(files) > 8
        for file in files:
            assert (here / file).read_bytes() == (tmp_path / "there" / family / file).read_bytes(), file
