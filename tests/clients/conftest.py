"""Real servers, proxies in front of them, and each client's program."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from omni_grpc.client import Client
from omni_grpc.config import BUNDLED
from omni_grpc.identity import tokens
from omni_grpc.types.caller import Scope
from tests.client.proxy import Proxy
from tests.clients.programs import LANGUAGES, PROMPT, REQUIRED, Program
from tests.models.cases import ENTRIES
from tests.server.certificates import Authority
from tests.web_page.studio import http_served

SMALL: dict[str, int] = {"width": 128, "height": 128, "steps": 4, "seed": 7}
LONG: dict[str, int] = {"width": 320, "height": 320, "steps": 200, "seed": 7}
"""Does not end while somebody waits for its first step."""
EDITS = "kontext"


@dataclasses.dataclass(frozen=True)
class Served:
    """A running server: its two ports, and a client of the driver's own."""

    port: int
    http_port: int
    client: Client
    ca: str | None = None

    def where(self, port: int | None = None, http_port: int | None = None) -> dict[str, Any]:
        """The fields that tell a program where it is, or that other ports lead there."""
        scheme = "https" if self.ca else "http"
        found = {
            "address": f"localhost:{port or self.port}",
            "url": f"{scheme}://localhost:{http_port or self.http_port}",
            "model": "demo",
        }
        return found | ({"ca": self.ca} if self.ca else {})


@contextlib.contextmanager
def _served(*flags: str, ca: str | None = None, **options: Any) -> Iterator[Served]:
    with http_served(BUNDLED, *flags) as server:
        port, http_port = (int(address.rpartition(":")[2]) for address in (server.grpc.address, server.url))
        with Client(f"localhost:{port}", ca=ca, **options) as client:
            yield Served(port, http_port, client, ca)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A worker of pytest-xdist (--dist loadgroup) takes all behaviours of a language: each has servers of its own."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            found = re.search(r"\[(\w+)\]$", item.nodeid) if item.path.stem == "test_conformance" else None
            item.add_marker(pytest.mark.xdist_group(found[1] if found else item.path.stem))


@pytest.fixture(params=LANGUAGES)
def program(request: pytest.FixtureRequest) -> Program:
    found = Program(request.param)
    if not found.built:
        how = f"{found.command[-1]} is not built: make clients"
        if os.environ.get(REQUIRED) == "1":
            pytest.fail(f"{REQUIRED}=1, and {how}")
        pytest.skip(how)
    return found


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that everybody may ask, of the bundled model and of one that edits."""
    folder = ENTRIES["FluxKontextPipeline"].build(tmp_path_factory.mktemp("checkpoints") / EDITS)
    with _served("--model", f"{EDITS}={folder}", "--max-queue", "100") as running:
        yield running


@dataclasses.dataclass(frozen=True)
class Guarded:
    """A server with TLS, tokens and limits of a tenant."""

    server: Served
    token: str
    other_ca: str
    audit: Path


@pytest.fixture(scope="session")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    authority = Authority(folder)
    cert, key = authority.issue("server", "localhost", "127.0.0.1")
    token = _token(folder / "callers.yaml")
    limits = folder / "limits.yaml"
    limits.write_text("default:\n  max_running: 1\n  max_queued: 1\n")
    (folder / "other").mkdir()
    other = Authority(folder / "other").file
    flags = ("--tls-cert", cert, "--tls-key", key, "--token-file", str(folder / "callers.yaml"))
    with _served(
        *flags, "--tenant-limits", str(limits), "--audit-log", str(folder / "audit"), ca=authority.file, token=token
    ) as running:
        yield Guarded(running, token, other, folder / "audit")


def _token(file: Path) -> str:
    scopes = frozenset({Scope.GENERATE, Scope.READ})
    now = datetime.datetime.now(datetime.UTC)
    return tokens.add(file, tenant="studio", subject="farm", scopes=scopes, expires=None, now=now)[0]


@dataclasses.dataclass(frozen=True)
class Cuttable:
    """Proxies in front of both ports of a server; a program is given them as its ports."""

    grpc: Proxy
    http: Proxy

    def where(self, server: Served) -> dict[str, Any]:
        return server.where(self.grpc.port, self.http.port)

    def each(self) -> tuple[Proxy, Proxy]:
        return self.grpc, self.http


@pytest_asyncio.fixture
async def proxies(plain: Served) -> AsyncIterator[Cuttable]:
    running = Cuttable(await Proxy(plain.port).start(), await Proxy(plain.http_port).start())
    yield running
    for proxy in running.each():
        await proxy.stop()


@pytest.fixture(scope="session")
def expected(plain: Served) -> Any:
    """What the Python client of this package gets for the small request."""
    return plain.client.generate_image(PROMPT, model="demo", **SMALL)
