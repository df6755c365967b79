"""Makes `.venv`: torch first, then this package in editable mode with its development tools.

`make setup` runs it, and so does every target that needs the environment. It answers at once while nothing has changed
that it depends on: the interpreter, the torch asked for, pyproject.toml, setup.py, csrc/ and the compilers.
`--gen` makes `.venv/gen` instead, where the code generator lives: it needs an older protobuf than the package may use.
`--ray` adds the extra of that name to `.venv`, which is 200 MB that few need.

torch is chosen here and not by pip, because pip's choice on Linux is a CUDA build of several gigabytes.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
OLDEST_PYTHON = (3, 11)
CPU_TORCH = "2.13.0"
NOT_FOUND = ("No matching distribution found", "ResolutionImpossible")
"""How pip says that it has no such version; the second where pip is configured with constraints."""

BUILD_VARIABLES = ("OMNI_GRPC_BUILD", "OMNI_GRPC_CUDA_ARCHS")
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


class SetupError(Exception):
    """Setup cannot go on; the message says what to do."""


def main() -> int:
    parser = argparse.ArgumentParser(description="make the virtual environment of this checkout", allow_abbrev=False)
    parser.add_argument("--torch", metavar="REQUIREMENT", help='which torch, for example "torch==2.12.*"')
    parser.add_argument("--gen", action="store_true", help="make .venv/gen, the environment of the code generator")
    parser.add_argument("--ray", action="store_true", help="add what the extra `ray` names to .venv")
    options = parser.parse_args()
    try:
        check_interpreter()
        if options.gen:
            make_generator_environment()
        elif options.ray:
            add_extra("ray")
        else:
            make_environment(options.torch)
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    return 0


def check_interpreter() -> None:
    """Raises SetupError where this interpreter is too old or cannot make a virtual environment."""
    if sys.version_info < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        raise SetupError(
            f"{sys.executable} is Python {platform.python_version()}, but {oldest} or newer is needed; "
            f"name another one: make setup PYTHON=/path/to/python{oldest}"
        )
    if importlib.util.find_spec("ensurepip") is None:
        raise SetupError(
            f"{sys.executable} has no ensurepip, so it cannot make a virtual environment; install it "
            "(Debian and Ubuntu: apt install python3-venv) or name another Python: make setup PYTHON=/path/to/python3"
        )


def make_environment(torch: str | None) -> None:
    """Brings `.venv` up to date. `torch` None keeps what was asked for last time; at first the machine decides."""
    ready = VENV / ".ready"
    before = read_stamp(ready)
    torch = torch or before.get("torch")
    inputs = [ROOT / "pyproject.toml", ROOT / "setup.py", Path(__file__), *(ROOT / "csrc").rglob("*")]
    stamp = {"python": interpreter(), "torch": torch, "inputs": digest(inputs), "compilers": compilers()}
    if stamp == before:
        return
    ready.unlink(missing_ok=True)
    start = time.monotonic()
    pip = make_venv(VENV)
    install_torch(pip, torch)
    project = read_project()
    # --no-build-isolation: the build links against the torch that was just installed, so it brings no tools of its own.
    pip_install(pip, *project["build-system"]["requires"], "ninja")
    if compilers()["nvcc"]:
        install_cutlass(pip, project["tool"]["omni-grpc"]["cutlass"])
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder, "constraints.txt")
        constraints.write_text(f"torch=={installed_version(VENV, 'torch')}\n", encoding="utf-8")
        say("building and installing omni-grpc")
        # compat: a plain path entry, which mypy and pyright follow; the default is an import hook, which they cannot.
        editable = ("--no-build-isolation", "--config-settings=editable_mode=compat")
        # first, because the server depends on it, and no index may have it
        pip_install(pip, "--editable", f"{ROOT / 'clients' / 'python'}[media,progress]", *editable)
        with_extras = f"{ROOT}[dev,web,traces,plot]"
        failure = pip.try_install("--editable", with_extras, *editable, "--constraint", str(constraints))
        if failure:
            raise SetupError(native_failure(failure) or f"{failure}\nsetup: omni-grpc was not installed")
    ready.write_text(json.dumps(stamp), encoding="utf-8")
    library = (ROOT / "omni_grpc" / "_native.so").is_file()
    asked = os.environ.get("OMNI_GRPC_BUILD") == "none"
    without = "as asked" if asked else "it needs Linux and a C++ compiler"
    how = "with the op library" if library else f"without the op library ({without})"
    say(f"ready in {time.monotonic() - start:.0f} s: torch {installed_version(VENV, 'torch')}, {how}")


def make_generator_environment() -> None:
    """Brings `.venv/gen` up to date with the `gen` extra of pyproject.toml."""
    folder = VENV / "gen"
    requirements = read_project()["project"]["optional-dependencies"]["gen"]
    stamp = {"python": interpreter(), "requirements": requirements}
    if read_stamp(folder / ".ready") == stamp:
        return
    pip = make_venv(folder)
    say(f"installing the code generator: {', '.join(requirements)}")
    pip_install(pip, *requirements)
    (folder / ".ready").write_text(json.dumps(stamp), encoding="utf-8")


def add_extra(name: str) -> None:
    """Installs what an extra of pyproject.toml names into `.venv`, which is there."""
    requirements = read_project()["project"]["optional-dependencies"][name]
    ready = VENV / f".{name}"
    stamp = {"python": interpreter(), "requirements": requirements}
    if read_stamp(ready) == stamp:
        return
    say(f"installing the extra {name}: {', '.join(requirements)}")
    pip_install(Pip(VENV / "bin" / "python"), *requirements)
    ready.write_text(json.dumps(stamp), encoding="utf-8")


def install_torch(pip: Pip, asked: str | None) -> None:
    """Installs the torch that was asked for, else the one that suits this machine."""
    reason, choices = torch_choices(asked, gpu=has_gpu(), platform=sys.platform)
    for arguments in choices:
        say(f"installing {' '.join(arguments)}: {reason}")
        failure = pip.try_install(*arguments)
        if not failure:
            return
        if not any(sign in failure for sign in NOT_FOUND):
            break
    raise SetupError(
        f"{failure}\nsetup: no torch was installed; name one that this machine can get: make setup TORCH=..."
    )


def torch_choices(asked: str | None, *, gpu: bool, platform: str) -> tuple[str, list[list[str]]]:
    """Why, and what pip is asked for; each further choice is for a pip that knows no such version as the one before."""
    if asked:
        return "as asked", [[asked]]
    if gpu:
        allowed = next(line for line in read_project()["project"]["dependencies"] if re.match(r"torch\b", line))
        return "nvidia-smi lists a GPU", [[allowed]]
    if platform == "darwin":
        return "the build for macOS", [[f"torch=={CPU_TORCH}"]]
    # PyPI does not have the CPU build, but a machine may have an index or a folder of its own that does.
    build = f"torch=={CPU_TORCH}+cpu"
    return "no NVIDIA GPU here, TORCH= overrides", [[build], ["--index-url", CPU_INDEX, build]]


def install_cutlass(pip: Pip, requirement: str) -> None:
    """Without its dependencies, which are those of its Python tools. The library can do without it."""
    failure = pip.try_install("--no-deps", requirement)
    if failure:
        say(f"no {requirement}, so products of 8 bits are torch's, and cuda-check fails: {failure.splitlines()[-1]}")


class Pip:
    """The pip of one virtual environment. Quiet: its errors are shown, its progress and warnings are not."""

    def __init__(self, python: Path) -> None:
        self._command = [str(python), "-m", "pip", "install", "-qq", "--no-input", "--disable-pip-version-check"]

    def try_install(self, *arguments: str) -> str:
        """Installs and returns "", or what pip said where it failed."""
        result = subprocess.run([*self._command, *arguments], cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
        return (result.stderr.strip() or f"pip exits with {result.returncode}") if result.returncode else ""


def pip_install(pip: Pip, *arguments: str) -> None:
    failure = pip.try_install(*arguments)
    if failure:
        raise SetupError(f"{failure}\nsetup: pip install {' '.join(arguments)} failed")


def native_failure(output: str) -> str:
    """What setup.py says about an op library that does not build, from the output of pip; empty if it says nothing."""
    said = re.search(r"omni_grpc: the op library does not build: .*(?:\n *omni_grpc: .*)*", output)
    return re.sub(r"\n *omni_grpc: ", "\nsetup: ", said[0].removeprefix("omni_grpc: ")) if said else ""


def make_venv(folder: Path) -> Pip:
    """Creates the environment, anew where it belongs to another interpreter or was left half made."""
    python, origin = folder / "bin" / "python", folder / ".interpreter"
    whole = python.exists() and origin.is_file() and origin.read_text(encoding="utf-8") == interpreter()
    if not whole:
        say(f"creating {folder.relative_to(ROOT)} with Python {platform.python_version()}")
        try:
            venv.EnvBuilder(with_pip=True, clear=True, symlinks=True).create(folder)
        except (OSError, subprocess.CalledProcessError) as error:
            raise SetupError(f"{folder} cannot be created: {error}") from error
        origin.write_text(interpreter(), encoding="utf-8")
    return Pip(python)


def has_gpu() -> bool:
    """True where the NVIDIA driver lists a device."""
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listing.returncode == 0 and "GPU" in listing.stdout


def compilers() -> dict[str, str | None]:
    """What setup.py lets decide about the op library, so that a compiler installed later leads to a new build."""
    found = {name: shutil.which(name) for name in ("c++", "nvcc")}
    return found | {name: os.environ.get(name) for name in ("CXX", "CUDA_HOME", *BUILD_VARIABLES)}


def interpreter() -> str:
    """The interpreter behind this one, which is itself where no virtual environment is active."""
    return f"{platform.python_version()} {sys.base_prefix}"


def installed_version(folder: Path, package: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.check_output([str(folder / "bin" / "python"), "-c", code], text=True).strip()


def digest(paths: list[Path]) -> str:
    """One hash over the names and contents of files; what does not exist counts as absent."""
    result = hashlib.sha256()
    for path in sorted(path for path in paths if path.is_file()):
        content = path.read_bytes()
        result.update(f"{path.relative_to(ROOT)} {len(content)}\n".encode())
        result.update(content)
    return result.hexdigest()


def read_stamp(path: Path) -> dict[str, Any]:
    try:
        stamp: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return {}
    return stamp


def read_project() -> dict[str, Any]:
    import tomllib  # not there in the Pythons that check_interpreter refuses

    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def say(message: str) -> None:
    print(f"setup: {message}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
