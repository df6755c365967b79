"""The wheels of the client and of the server: each file is in one of them, and the server asks for the client."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile

import pytest

from omni_grpc.types.version import __version__
from tests.clients.programs import ROOT


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, zipfile.ZipFile]:
    """Both, built from a copy of what git tracks, so that nothing that was built before gets in."""
    folder = tmp_path_factory.mktemp("wheels")
    tree = folder / "tree"
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, names.split("\0")):
        if (ROOT / name).exists():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name, follow_symlinks=False)
    found = {}
    for name, source in (("client", tree / "clients" / "python"), ("server", tree)):
        command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
        environment = os.environ | {"OMNI_GRPC_BUILD": "none"}
        command += ["--wheel-dir", str(folder / name), str(source)]
        subprocess.run(command, check=True, env=environment, cwd=folder)
        (wheel,) = (folder / name).glob("*.whl")
        found[name] = zipfile.ZipFile(wheel)
    return found


def modules(wheel: zipfile.ZipFile) -> set[str]:
    return {name for name in wheel.namelist() if ".dist-info/" not in name}


def test_no_file_is_in_both_and_none_is_missing(wheels: dict[str, zipfile.ZipFile]) -> None:
    client, server = modules(wheels["client"]), modules(wheels["server"])
    assert not client & server
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "omni_grpc").rglob("*.py")}
    assert sources <= client | server
    assert {"omni_grpc/__init__.py", "omni_grpc/py.typed", "omni_grpc_client/__init__.py"} <= client
    assert {"omni_grpc/omni.py", "omni_grpc/engine/engine.py"} <= server


def test_the_server_needs_the_client_of_its_version(wheels: dict[str, zipfile.ZipFile]) -> None:
    for name, distribution in (("client", "omni_grpc_client"), ("server", "omni_grpc")):
        (path,) = (path for path in wheels[name].namelist() if path.endswith(".dist-info/METADATA"))
        assert path == f"{distribution}-{__version__}.dist-info/METADATA"
    metadata = wheels["server"].read(f"omni_grpc-{__version__}.dist-info/METADATA").decode()
    assert f"Requires-Dist: omni-grpc-client=={__version__}\n" in metadata


def test_the_client_needs_no_torch(wheels: dict[str, zipfile.ZipFile]) -> None:
    metadata = wheels["client"].read(f"omni_grpc_client-{__version__}.dist-info/METADATA").decode()
    needed = [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]
    names = {
        line.removeprefix("Requires-Dist: ").split("=")[0].split(">")[0].split("!")[0].split("<")[0] for line in needed
    }
    assert names == {"grpcio", "protobuf", "googleapis-common-protos"}
