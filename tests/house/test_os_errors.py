"""Errors of the system reach the user in words: `plain(error)`, never "[Errno 28] No space left on device"."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.house.source import PACKAGES, ROOT, python_files

FAMILY = {"OSError", "IOError", "PermissionError", "FileNotFoundError", "NotADirectoryError", "IsADirectoryError"}


def test_no_error_of_the_system_is_put_into_a_text_as_it_is() -> None:
    found = [
        f"{path}:{line}: use plain(error)"
        for path in python_files(*PACKAGES)
        for line in bare(ast.parse((ROOT / path).read_text(encoding="utf-8")))
    ]
    assert not found, "\n".join(found)


def test_the_search_finds_what_it_is_for() -> None:
    caught = "try:\n    f()\nexcept (OSError, ValueError) as error:\n    {}\n"
    for use in ('g(f"no: {error}")', 'g(f"no: {error!r}")', "g(str(error))", 'logger.info("no: %s", error)'):
        assert list(bare(ast.parse(caught.format(use)))) == [4], use
    for use in ('g(f"no: {plain(error)}")', "raise X from error", 'g(f"{error.errno}")'):
        assert list(bare(ast.parse(caught.format(use)))) == [], use


def bare(tree: ast.AST) -> Iterator[int]:
    """The lines on which a caught error of the system becomes text."""
    for handler in ast.walk(tree):
        if not isinstance(handler, ast.ExceptHandler) or handler.name is None or handler.type is None:
            continue
        names = {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)}
        if not names & FAMILY:
            continue
        for node in ast.walk(handler):
            match node:
                case ast.FormattedValue(value=ast.Name(id=name)) if name == handler.name:
                    yield node.lineno
                case ast.Call(func=ast.Name(id="str"), args=[ast.Name(id=name)]) if name == handler.name:
                    yield node.lineno
                case ast.Call(func=ast.Attribute(value=ast.Name(id="logger")), args=[_, *rest]):
                    if any(isinstance(one, ast.Name) and one.id == handler.name for one in rest):
                        yield node.lineno
