"""The import contracts of pyproject.toml hold, and each of them fails on an import that it forbids.

The second half runs on a skeleton: the modules that the contracts name, all empty but for the
imports that a contract excuses and the one that it forbids.
"""

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

from .source import ROOT

LINT_IMPORTS = Path(sys.executable).with_name("lint-imports")
FORBIDDEN: Mapping[str, tuple[str, str]] = {
    "The control tower does not import torch": ("omni_grpc.engine", "import torch"),
    "The compute tower does not import grpc or the control tower": ("omni_grpc.worker", "import grpc"),
    "The compute tower is layered": ("omni_grpc.nn", "import omni_grpc.pipeline"),
    "The control tower is layered": ("omni_grpc.engine", "import omni_grpc.server"),
    "Servicers reach the engine through the gate alone": ("omni_grpc.server", "import omni_grpc.engine"),
    "The gate and the fleet know no stack": ("omni_grpc.gate", "import grpc"),
    "Outbound HTTP imports the settings, the types and its library alone": ("omni_grpc.outbound", "import grpc"),
    "The shared rooms are layered": ("omni_grpc.types", "import omni_grpc.config"),
    "The shared rooms import the standard library and each other alone": ("omni_grpc.config", "import yaml"),
    "Texts in media files need the types, Pillow and av alone": ("omni_grpc.metadata", "import omni_grpc.config"),
    "The mapper imports protobuf, the stubs and the types alone": ("omni_grpc.wire", "import omni_grpc.config"),
    "Who a caller is depends on no stack": ("omni_grpc.identity", "import grpc"),
    "The store knows no stack, no engine and no rule": ("omni_grpc.store", "import omni_grpc.resolve.rules"),
    "Webhooks know no stack and no engine": ("omni_grpc.webhooks", "import omni_grpc.engine"),
    "The client stands alone": ("omni_grpc.client", "import omni_grpc.engine"),
    "Model families do not know each other": ("omni_grpc.models.family", "import omni_grpc.models.other"),
    "Features do not know each other": ("omni_grpc.features.cache", "import omni_grpc.features.lora"),
    "Features and models do not know each other": ("omni_grpc.features.cache", "import omni_grpc.models.family"),
}
"""For each contract, by name: a module and an import in it that breaks this contract and no other."""


def lint_imports(folder: Path) -> dict[str, str]:
    """Runs import-linter in `folder`. KEPT or BROKEN for each contract."""
    result = subprocess.run([LINT_IMPORTS], cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    verdicts = dict(re.findall(r"^(.+?) (KEPT|BROKEN)", result.stdout, re.MULTILINE))
    assert verdicts, result.stdout + result.stderr
    assert (result.returncode == 0) == ("BROKEN" not in verdicts.values()), result.stdout
    return verdicts


@pytest.fixture
def skeleton(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    settings = tmp_path.joinpath("pyproject.toml").read_text(encoding="utf-8")
    named = re.findall(r"\bomni_grpc(?:\.\w+)+", settings)
    members = {importer for importer, _ in FORBIDDEN.values()} | {"omni_grpc.models.other", "omni_grpc.features.lora"}
    for module in {"omni_grpc", *members, *named}:
        folder = tmp_path.joinpath(*module.split("."))
        folder.mkdir(parents=True, exist_ok=True)
        for package in (folder, *folder.parents[: module.count(".")]):
            package.joinpath("__init__.py").touch()
    for importer, imported in re.findall(r'"(omni_grpc[.\w]+) -> ([.\w]+)"', settings):
        with tmp_path.joinpath(*importer.split("."), "__init__.py").open("a", encoding="utf-8") as file:
            file.write(f"import {imported}\n")
    return tmp_path


def test_every_contract_holds() -> None:
    assert set(lint_imports(ROOT).values()) == {"KEPT"}


def test_every_contract_has_a_forbidden_import_here() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    assert [contract["name"] for contract in tool["importlinter"]["contracts"]] == list(FORBIDDEN)


def test_the_skeleton_keeps_every_contract(skeleton: Path) -> None:
    assert lint_imports(skeleton) == dict.fromkeys(FORBIDDEN, "KEPT")


@pytest.mark.parametrize("contract", FORBIDDEN)
def test_a_contract_fails_on_a_forbidden_import(skeleton: Path, contract: str) -> None:
    module, line = FORBIDDEN[contract]
    skeleton.joinpath(*module.split("."), "__init__.py").write_text(f"{line}\n", encoding="utf-8")
    assert lint_imports(skeleton) == {**dict.fromkeys(FORBIDDEN, "KEPT"), contract: "BROKEN"}


def test_a_detour_does_not_help(skeleton: Path) -> None:
    skeleton.joinpath("omni_grpc/detour.py").write_text("def f():\n    import torch\n", encoding="utf-8")
    skeleton.joinpath("omni_grpc/server/__init__.py").write_text("import omni_grpc.detour\n", encoding="utf-8")
    assert lint_imports(skeleton)["The control tower does not import torch"] == "BROKEN"
