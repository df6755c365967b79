"""The page that the package brings: what can be said of it without a browser and without node."""

from __future__ import annotations

import gzip
import json
import re

from .source import ROOT

PAGE = ROOT / "omni_grpc" / "web" / "page"
WEB = ROOT / "clients" / "web"
LIMIT = 120_000
"""As in clients/web/build.mjs."""


def test_scripts_and_styles_stay_small() -> None:
    compressed = sum(len(gzip.compress((PAGE / name).read_bytes())) for name in ("app.js", "app.css"))
    assert compressed < LIMIT
    assert f"LIMIT = {LIMIT:_};" in (WEB / "build.mjs").read_text(encoding="utf-8")


def test_the_policy_of_the_page_allows_all_of_it() -> None:
    """Nothing inline, and nothing of another origin."""
    html = (PAGE / "index.html").read_text(encoding="utf-8")
    assert re.findall(r"<script[^>]*>(?!</script>)|<style| style=| on\w+=", html) == []
    assert {name for name in re.findall(r'(?:src|href)="([^"]*)"', html) if not name.startswith("page/")} == set()
    assert {path.name for path in PAGE.iterdir()} == {"index.html", "app.js", "app.css", "icon.svg", "licenses.txt"}


def test_packages_are_pinned_and_name_no_registry() -> None:
    package = json.loads((WEB / "package.json").read_text(encoding="utf-8"))
    asked = package["dependencies"] | package["devDependencies"]
    assert [version for version in asked.values() if not re.fullmatch(r"\d+\.\d+\.\d+", version)] == []
    lock = json.loads((WEB / "package-lock.json").read_text(encoding="utf-8"))["packages"]
    assert {name: lock[f"node_modules/{name}"]["version"] for name in asked} == asked
    assert [name for name, entry in lock.items() if "resolved" in entry] == []


def test_the_docs_show_the_core_of_the_example() -> None:
    shown = re.search(r"```ts\n(.*?)```", (ROOT / "docs" / "web.md").read_text(encoding="utf-8"), re.DOTALL)
    assert shown is not None
    example = (WEB / "examples" / "progress.ts").read_text(encoding="utf-8")
    assert _lines(shown[1]) in _lines(example)
    assert len(example.splitlines()) < 40


def _lines(text: str) -> str:
    return "\n".join(line.strip() for line in text.splitlines())
