"""Programs of this repository, run in this process: scripts by their path, commands by their words."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from omni_grpc.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("examples", "tools", "benchmarks")
SCRIPTS = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.py")
    if 'if __name__ == "__main__":' in path.read_text(encoding="utf-8")
)
COMMANDS = (
    *(
        "generate",
        "edit",
        "video",
        "audio",
        "models",
        "jobs",
        "jobs export",
        "info",
        "health",
        "watch",
        "wait",
        "cancel",
        "drain",
        "profile",
        "top",
        "download",
        "show",
        "batch",
    ),
    *("serve", "doctor", "bench", "bench prompt-accuracy", "bench serve", "bench compare", "pull", "convert"),
    *("lora", "lora inspect", "lora merge", "lora extract", "lora load", "lora list", "lora unload", "calibrate"),
    *("token", "token new", "token list", "token revoke", "token names"),
)
SERVE = "omni_grpc/serve.py"

Ended = tuple[int, str, str]


def run(name: str, *arguments: str) -> Ended:
    """A script, or a command of the command line: exit code, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    script = name.endswith(".py")
    argv = [name, *arguments] if script else ["omni-grpc", *name.split(), *arguments]
    code: object = 0
    with _argv(argv), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            if name.endswith("/__main__.py"):
                runpy.run_module(name.removesuffix("/__main__.py").replace("/", "."), run_name="__main__")
            elif script:
                runpy.run_path(str(ROOT / name), run_name="__main__")
            else:
                code = main()
        except SystemExit as ended:
            code = ended.code
    return int(str(code or 0)), out.getvalue(), err.getvalue()


@contextlib.contextmanager
def _argv(argv: list[str]) -> Iterator[None]:
    """`argv` for a program, which may add to the path, as in a checkout that is installed."""
    with mock.patch.object(sys, "argv", argv), mock.patch.object(sys, "path", [str(ROOT), *sys.path]):
        yield
