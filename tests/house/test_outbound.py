"""HTTP leaves this package in one place: `omni_grpc/outbound/`. Beside it there are only the gRPC client, and downloads
from the hub by the library of the hub.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from .source import PACKAGES, python_files, read

ROOM = Path("omni_grpc/outbound")
OPERATORS = {Path("omni_grpc/identity/jwks.py")}
"""What fetches from an address that the operator alone names: the policy is about those that callers name."""
HTTP = {
    *("urllib.request", "urllib3", "http.client", "http.server", "ftplib", "requests", "httpx", "httpx2", "httpcore"),
    *("httpcore2", "aiohttp", "websocket", "websockets", "pycurl", "smtplib", "xmlrpc", "boto3", "fsspec"),
}
FETCHING = {"urlopen", "urlretrieve", "load_image", "load_video", "load_state_dict_from_url", "download_url_to_file"}
"""Functions of other libraries that fetch what they are given."""


def ways_out(text: str) -> Iterator[str]:
    """Imports of what speaks HTTP, and uses of what fetches by itself."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (f"{node.lineno}: import {alias.name}" for alias in node.names if speaks_http(alias.name))
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            if any(map(speaks_http, names)) or FETCHING & {alias.name for alias in node.names}:
                yield f"{node.lineno}: from {node.module}"
        elif isinstance(node, ast.Attribute) and node.attr in FETCHING:
            yield f"{node.lineno}: {node.attr}"
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("import_module", "__import__"):
            named = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            yield from (f"{node.lineno}: {name}" for name in named if speaks_http(name))


def speaks_http(module: str) -> bool:
    parts = module.split(".")
    return any(".".join(parts[:n]) in HTTP for n in range(1, len(parts) + 1))


def test_http_leaves_in_one_place() -> None:
    files = [path for path in python_files(*PACKAGES) if not path.is_relative_to(ROOM) and path not in OPERATORS]
    found = {str(path): ways for path in files if (ways := list(ways_out(read(path))))}
    assert found == {}
    assert any(list(ways_out(read(path))) for path in python_files(str(ROOM)))


@pytest.mark.parametrize(
    "line",
    [
        "import requests",
        "import httpx2 as web",
        "import urllib.request",
        "from urllib import request",
        "from urllib.request import urlopen",
        "from http.client import HTTPSConnection",
        "from httpx2._urls import URL",
        "def f():\n    import aiohttp.client",
        "from diffusers.utils import load_image",
        "importlib.import_module('requests')",
        "torch.hub.load_state_dict_from_url(url)",
    ],
)
def test_a_way_out_is_seen(line: str) -> None:
    assert list(ways_out(line))


@pytest.mark.parametrize(
    "line", ["import urllib.parse", "from http import HTTPStatus", "from huggingface_hub import x"]
)
def test_what_stays_inside_is_not(line: str) -> None:
    assert not list(ways_out(line))
