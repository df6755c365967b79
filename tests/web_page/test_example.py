"""The progress UI of docs/web.md, on a page of another origin."""

from __future__ import annotations

import functools
import http.server
import shutil
import subprocess
import threading

import pytest

from tests.web_page.conftest import missing
from tests.web_page.studio import ROOT, http_served, until

WEB = ROOT / "clients" / "web"


class Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *about: object) -> None:
        """Says nothing of each request."""


@pytest.fixture
def origin(tmp_path):
    """An origin with the example on it."""
    esbuild = WEB / "node_modules" / ".bin" / "esbuild"
    if not esbuild.exists():
        missing("esbuild")
    shutil.copy(WEB / "examples" / "progress.html", tmp_path)
    bundle = [str(esbuild), "examples/progress.ts", "--bundle", "--format=esm", f"--outfile={tmp_path}/progress.js"]
    subprocess.run([*bundle, "--log-level=warning"], cwd=WEB, check=True)
    handler = functools.partial(Silent, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_the_example_shows_progress_and_the_picture(origin, browser):
    with http_served("omni_grpc/demo", "--http-origins", origin) as server:
        page = browser.new_page()
        page.goto(f"{origin}/progress.html?server={server.url}")
        page.get_by_role("button", name="Generate").click()
        seen = set()
        status, image = page.get_by_role("status"), page.locator("img")
        while status.inner_text() != "completed":
            seen.add((status.inner_text(), image.get_attribute("src")))
            assert "rror" not in status.inner_text(), status.inner_text()
        assert len({text for text, _ in seen if text.startswith("step ")}) > 3
        assert len({source for _, source in seen}) > 3
        until(lambda: image.evaluate("image => image.complete && image.naturalWidth") == 128)
        assert page.evaluate("document.querySelector('progress').value") == 1
        page.close()
