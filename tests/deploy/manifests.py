"""The files of deploy/ as tests read them: what kustomize makes of them, and the settings that they come to."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from omni_grpc.config import EngineConfig
from omni_grpc.config.settings import settings

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
OVERLAYS = sorted(path.name for path in (KUBERNETES / "overlays").iterdir())
COMPONENTS = sorted(path.name for path in (KUBERNETES / "components").iterdir())
BASE = "base"
NAME = "omni-grpc"
STOP_SECONDS = 10
"""What a worker has to finish its step once a drain is over, see `omni_grpc.engine.executor`."""

Manifest = Mapping[str, Any]


def documents(path: Path) -> list[Any]:
    """What a YAML file holds. Raises YAMLError."""
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


@functools.cache
def rendered(folder: Path) -> tuple[Manifest, ...]:
    """What `kubectl kustomize` makes of a folder. The test is skipped where there is none."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl, which has kustomize in it, is not installed")
    ran = subprocess.run(
        ["kubectl", "kustomize", str(folder)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == "", "warnings are of what is out of date"
    return tuple(yaml.safe_load_all(ran.stdout))


def overlay(name: str) -> tuple[Manifest, ...]:
    return rendered(KUBERNETES / BASE if name == BASE else KUBERNETES / "overlays" / name)


def one(manifests: tuple[Manifest, ...], kind: str) -> Manifest:
    (found,) = (it for it in manifests if it["kind"] == kind and it["metadata"]["name"].startswith(NAME))
    return found


def pod(manifests: tuple[Manifest, ...]) -> Manifest:
    spec: Manifest = one(manifests, "Deployment")["spec"]["template"]["spec"]
    return spec


def container(manifests: tuple[Manifest, ...]) -> Manifest:
    (found,) = pod(manifests)["containers"]
    return found


VALUES = {"OMNI_GRPC_STATE_URL": "postgresql://omni@db.example/omni"}
"""Of variables that a Secret has."""


def environment(manifests: tuple[Manifest, ...]) -> dict[str, str]:
    """The variables of the container, those of a ConfigMap looked up."""
    maps = {it["metadata"]["name"]: it["data"] for it in manifests if it["kind"] == "ConfigMap"}
    found = {}
    for variable in container(manifests).get("env", ()):
        source = variable.get("valueFrom", {})
        if "configMapKeyRef" in source:
            reference = source["configMapKeyRef"]
            found[variable["name"]] = maps[reference["name"]][reference["key"]]
        else:
            found[variable["name"]] = VALUES[variable["name"]] if source else variable["value"]
    return found


def configuration(manifests: tuple[Manifest, ...], folder: Path) -> EngineConfig:
    """What the server makes of the arguments, variables and settings of a pod."""
    mounted = next(
        it["data"]
        for it in manifests
        if it["kind"] == "ConfigMap" and it["metadata"]["name"].startswith("omni-grpc-settings")
    )
    for name, text in mounted.items():
        (folder / name).write_text(text, encoding="utf-8")
    argv = [word.replace("/etc/omni-grpc/", f"{folder}/") for word in container(manifests)["args"]]
    return read(argv, environment(manifests))


def read(argv: list[str], environ: Mapping[str, str]) -> EngineConfig:
    """The settings of a server. Raises ConfigError."""
    return settings(argv, environ, prog="omni-grpc serve", description="")


def variables(text: str) -> Iterator[str]:
    """The names of our variables in a text."""
    yield from re.findall(r"\bOMNI_GRPC_[A-Z0-9_]+", text)
