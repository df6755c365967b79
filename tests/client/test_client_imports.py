"""What importing the client and the command line costs."""

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "diffusers", "transformers", "PIL", "rich")


@pytest.mark.parametrize("module", ["omni_grpc.client", "omni_grpc.cli.main"])
def test_nothing_heavy_is_loaded(module):
    program = f"import sys, {module}; print([name for name in {HEAVY} if name in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).resolve().parents[2], capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert found.stdout == "[]\n"
