"""Clients have the version of the server, wherever a packager looks for it."""

import re

import pytest

from omni_grpc.types.version import __version__

from .source import ROOT

PLACES = {
    "pyproject.toml": r'"omni-grpc-client==([^"]+)"',
    "clients/typescript/package.json": r'^  "version": "([^"]+)"',
    "clients/java/pom.xml": r"^  <version>([^<]+)</version>",
    "clients/java/Makefile": r"^VERSION := (\S+)",
    "clients/cpp/CMakeLists.txt": r"^project\(\w+ VERSION (\S+) ",
    "clients/comfyui/pyproject.toml": r'^version = "([^"]+)"',
}
"""File -> where its version stands. clients/python reads omni_grpc/types/version.py; Go has a tag."""


@pytest.mark.parametrize("name", PLACES)
def test_a_client_has_the_version_of_the_server(name: str) -> None:
    found = re.findall(PLACES[name], (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)
    assert found == [__version__]
