"""Generates omni_grpc/v1 from proto/omni_grpc/v1, or with --check says which committed files are stale.

    python tools/gen_protos.py            write the stubs
    python tools/gen_protos.py --check    exit 1 and name the files that differ

The generator's version decides which protobuf and grpcio the stubs can be imported with, so it is pinned: grpcio-tools
1.78.0 makes stubs for protobuf >= 6.31.1 and grpcio >= 1.78.0. The pins are those of the extra `gen` in pyproject.toml.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"
PACKAGE = Path("omni_grpc") / "v1"


def main() -> int:
    parser = argparse.ArgumentParser(description="Generates the gRPC stubs in omni_grpc/v1.", allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="compare with the committed stubs instead of writing them")
    check = parser.parse_args().check
    if problem := toolchain_problem():
        print(problem, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        changes = differences(Path(folder) / PACKAGE, ROOT / PACKAGE)
        if not check:
            apply(changes, Path(folder) / PACKAGE, ROOT / PACKAGE)
    for name, what in changes.items():
        print(f"{PACKAGE / name}: {what if check else 'written' if what != 'surplus' else 'removed'}")
    if check and changes:
        print("The stubs are not those of proto/. Run: python tools/gen_protos.py", file=sys.stderr)
        return 1
    return 0


def pins() -> dict[str, str]:
    """The packages that generate, and their versions: the extra `gen` of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return dict(requirement.split("==") for requirement in project["optional-dependencies"]["gen"])


def toolchain_problem() -> str:
    """What is wrong with the installed generator and how to mend it, or ""."""
    wrong = []
    for package, wanted in pins().items():
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found = "not installed"
        if found != wanted:
            wrong.append(f"  {package}: needs {wanted}, is {found}")
    if not wrong:
        return ""
    requirements = " ".join(f"{package}=={version}" for package, version in pins().items())
    return "\n".join(
        [
            f"The stubs cannot be generated with {sys.executable}:",
            *wrong,
            "`make gen` and `make checkgen` do it in an environment of its own, since these pins and the packages of a",
            "server may not go together. By hand:",
            f"  python -m venv .venv-gen && .venv-gen/bin/pip install {requirements}",
            "  .venv-gen/bin/python tools/gen_protos.py",
        ]
    )


def generate(out: Path) -> None:
    """Runs protoc over every proto file of the package; the stubs land in out/omni_grpc/v1."""
    import grpc_tools

    sources = sorted((PROTO / PACKAGE).glob("*.proto"))
    services = [path for path in sources if re.search(r"^service ", path.read_text(encoding="utf-8"), re.MULTILINE)]
    includes = [PROTO, Path(grpc_tools.__file__).parent / "_proto"]
    plugin = Path(sys.executable).parent / "protoc-gen-mypy_grpc"
    protoc = [sys.executable, "-m", "grpc_tools.protoc", *(f"-I{path}" for path in includes)]
    messages = [f"--python_out={out}", f"--pyi_out={out}"]
    # Servicer methods are not abstract in the stubs either: what a servicer leaves out answers UNIMPLEMENTED.
    calls = [
        f"--grpc_python_out={out}",
        f"--plugin=protoc-gen-mypy_grpc={plugin}",
        f"--mypy_grpc_out=quiet,generate_concrete_servicer_stubs:{out}",
    ]
    subprocess.run([*protoc, *messages, *map(str, sources)], check=True)
    subprocess.run([*protoc, *calls, *map(str, services)], check=True)


def differences(fresh: Path, committed: Path) -> dict[str, str]:
    """File name -> "missing", "stale" or "surplus", for every generated file that is not as it should be."""
    wanted = {path.name: path.read_bytes() for path in fresh.iterdir()}
    present = {path.name: path.read_bytes() for path in committed.glob("*_pb2*") if path.is_file()}
    changes = {}
    for name in sorted(wanted | present):
        if name not in present:
            changes[name] = "missing"
        elif name not in wanted:
            changes[name] = "surplus"
        elif wanted[name] != present[name]:
            changes[name] = "stale"
    return changes


def apply(changes: dict[str, str], fresh: Path, committed: Path) -> None:
    """Makes `committed` hold what `fresh` holds."""
    committed.mkdir(parents=True, exist_ok=True)
    for name, what in changes.items():
        if what == "surplus":
            (committed / name).unlink()
        else:
            (committed / name).write_bytes((fresh / name).read_bytes())


if __name__ == "__main__":
    sys.exit(main())
