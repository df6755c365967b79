"""compute-sanitizer looks at all kernels: tools/sanitize.cu calls every launcher that the headers declare."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def test_every_launcher_is_called() -> None:
    headers = "".join(path.read_text() for path in sorted((ROOT / "csrc" / "common").glob("*.h")))
    launchers = set(re.findall(r"\b(omni_\w+(?:_cuda|_sm\d+))\(", headers))
    called = set(re.findall(r"\b(omni_\w+)\(", (ROOT / "tools" / "sanitize.cu").read_text()))
    assert len(launchers) > 10, "the headers declare them otherwise than this looks for"
    assert not launchers - called, "compute-sanitizer never sees these: call them in tools/sanitize.cu"
