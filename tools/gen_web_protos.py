"""Generates the messages of the web page, clients/web/src/gen, or with --check says which committed files are stale.

    python tools/gen_web_protos.py            write them
    python tools/gen_web_protos.py --check    exit 1 and name the files that differ

`make web` and `make web-check` run it with the protoc of the extra `gen`, as tools/gen_protos.py is run, and with the
plugin protoc-gen-es of clients/web/package-lock.json. The files are committed: a build of the page needs neither.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.gen_protos import PACKAGE, PROTO, ROOT, toolchain_problem

WEB = ROOT / "clients" / "web"
GENERATED = WEB / "src" / "gen"
PLUGIN = WEB / "node_modules" / ".bin" / "protoc-gen-es"


def main() -> int:
    parser = argparse.ArgumentParser(description="Generates the messages of the web page.", allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="compare with the committed files instead of writing them")
    check = parser.parse_args().check
    problem = toolchain_problem()
    if not PLUGIN.exists():
        problem += f"\n{PLUGIN.relative_to(ROOT)} is not there: run `npm ci` in clients/web"
    if problem:
        print(problem.strip(), file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh, committed = contents(Path(folder)), contents(GENERATED)
    stale = sorted(name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))
    for name in stale:
        path = GENERATED / name
        print(f"{path.relative_to(ROOT)}: {'stale' if check else 'written' if name in fresh else 'removed'}")
        if check:
            continue
        if name in fresh:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(fresh[name])
        else:
            path.unlink()
    if check and stale:
        print("The page's messages are not those of proto/. Run: make web", file=sys.stderr)
        return 1
    return 0


def generate(out: Path) -> None:
    """Runs protoc over the protos of the package and the details of errors; the files land in `out`."""
    import grpc_tools

    sources = [*sorted((PROTO / PACKAGE).glob("*.proto")), *sorted((PROTO / "google" / "rpc").glob("*.proto"))]
    includes = [PROTO, Path(grpc_tools.__file__).parent / "_proto"]
    command = [sys.executable, "-m", "grpc_tools.protoc", *(f"-I{path}" for path in includes)]
    command += [f"--plugin=protoc-gen-es={PLUGIN}", f"--es_out={out}", "--es_opt=target=ts"]
    subprocess.run([*command, *map(str, sources)], check=True)


def contents(folder: Path) -> dict[str, bytes]:
    """The files below a folder, by their relative path, without the spaces that protoc leaves at the ends of lines."""
    return dict(_files(folder))


def _files(folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(folder.rglob("*.ts")):
        yield path.relative_to(folder).as_posix(), re.sub(rb"[ \t]+\n", b"\n", path.read_bytes())


if __name__ == "__main__":
    sys.exit(main())
