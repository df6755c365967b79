"""Builds omni-grpc-client: the rooms of omni_grpc that a client needs, and `omni_grpc_client`, their short name.

The rooms lie in omni_grpc/, where the server has them too; the distribution omni-grpc leaves them out of its wheel and
depends on this one, so that there is one copy of them, whichever is installed first.
"""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

PACKAGE = Path(__file__).resolve().parents[2] / "omni_grpc"


class BuildRooms(build_py):
    """Copies the rooms into a wheel. An editable install finds them where they lie."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib) / "omni_grpc"
        settings = Path(__file__).with_name("pyproject.toml").read_text(encoding="utf-8")
        shared = tomllib.loads(settings)["tool"]["omni-grpc-client"]
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        for name in shared["files"]:
            shutil.copy(PACKAGE / name, target)
        for room in shared["rooms"]:
            shutil.copytree(PACKAGE / room, target / room, ignore=shutil.ignore_patterns("__pycache__"))


def version() -> str:
    """That of the server: a client and a server of one version have one API."""
    found = re.search(r'__version__ = "([^"]+)"', (PACKAGE / "types" / "version.py").read_text(encoding="utf-8"))
    assert found
    return found[1]


setup(version=version(), packages=["omni_grpc_client"], package_dir={"": "src"}, cmdclass={"build_py": BuildRooms})
