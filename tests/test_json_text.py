"""JSON that others wrote is read, or is a ValueError."""

import ast
from pathlib import Path

import pytest

import omni_grpc
from omni_grpc.types.json_text import read_json


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "9" * 5000, "{", b"\xff\xfe\xff", ""])
def test_whatever_cannot_be_read_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError):
        read_json(text)


def test_what_can_be_read_is() -> None:
    assert read_json(b'{"a": [1, 2.5, null]}') == {"a": [1, 2.5, None]}


def test_nothing_in_the_package_calls_the_parser_itself() -> None:
    """One that does meets RecursionError, which nobody catches. `identity` catches it beside other errors of tokens."""
    root = Path(omni_grpc.__file__).parent
    calls = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "json.loads"
    }
    assert calls <= {"types/json_text.py", "identity/jwks.py"}
