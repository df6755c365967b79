"""Chromium, servers with an HTTP port, and the page in a tab. TESTS_REQUIRE_WEB=1 says that Chromium must be there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.web_page.studio import AXE, HttpServer, Tab, http_served

REQUIRED = "TESTS_REQUIRE_WEB"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def missing(what: str) -> None:
    """Skips the test, or fails it where the browser must be there."""
    message = f"{what} is missing: `make test-web` needs playwright (the extra dev), chromium (apt) and `npm ci`"
    if os.environ.get(REQUIRED) == "1":
        pytest.fail(f"{REQUIRED}=1, and {message}")
    pytest.skip(message)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A Chromium of this machine, without a window."""
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        missing("playwright")
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        missing("Chromium")
    with sync_playwright() as playwright:
        # its sandbox refuses to run as root, which is what containers are
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        chromium = playwright.chromium.launch(executable_path=path, args=flags)
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def axe() -> str:
    """The source of axe-core, which looks for barriers in a page."""
    if not AXE.exists():
        missing("axe-core")
    return AXE.read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def demo() -> Iterator[HttpServer]:
    """A server of the bundled model, for all tests that need no other."""
    with http_served("omni_grpc/demo") as server:
        yield server


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny checkpoint by the name of its builder, made once."""
    from tools.tiny_checkpoints import BUILDERS

    made: dict[str, Path] = {}

    def build(name: str) -> Path:
        if name not in made:
            made[name] = BUILDERS[name](tmp_path_factory.mktemp("tiny") / name)
        return made[name]

    return build


@pytest.fixture
def open_tab(browser: Any) -> Iterator[Callable[..., Tab]]:
    """Opens the page of a server in a tab of its own, with a storage of its own. At the end of the test, what went
    wrong in one of them fails it.
    """
    tabs: list[Tab] = []

    def open_one(server: HttpServer, path: str = "/", **options: Any) -> Tab:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}} | options)
        tab = Tab(context.new_page(), server.url)
        tabs.append(tab)
        tab.go(path)
        return tab

    yield open_one
    for tab in tabs:
        tab.page.context.close()
    assert [error for tab in tabs for error in tab.errors] == []
