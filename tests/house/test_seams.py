"""What one room may know of another: who knows that activations may be quantized."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from .source import python_files, read

QUANTIZING = re.compile(r"(?<!de)quantiz|coded|_code_|attention_q", re.IGNORECASE)
"""How ops are called that make or take activations in 8 bits."""

QUANTIZES = ("omni_grpc/nn/activations.py", "omni_grpc/features/quant.py")
"""The files that may import such ops, or QuantizedActivation: the one place in nn, and the layers in 8 bits."""


def files(*places: str) -> Iterator[Path]:
    """The Python files at these places, each a file or a folder."""
    for place in places:
        yield from [Path(place)] if place.endswith(".py") else python_files(place)


def quantizing_imports(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("omni_grpc.ops", "omni_grpc.nn")):
            yield from (f"{node.lineno}: {alias.name}" for alias in node.names if QUANTIZING.search(alias.name))


def test_one_place_in_nn_knows_that_activations_may_be_quantized() -> None:
    rooms = files("omni_grpc/nn", "omni_grpc/features", "omni_grpc/pipeline", "omni_grpc/worker", "models")
    found = {str(path): names for path in rooms if (names := list(quantizing_imports(read(path))))}
    assert set(found) == set(QUANTIZES), found


@pytest.mark.parametrize(
    ("code", "seen"),
    [
        ("from omni_grpc.ops.quant import quantize_rows", True),
        ("from omni_grpc.ops.attention_q import CodedTiles", True),
        ("from omni_grpc.ops.rope_heads import qk_norm_rope_code_heads", True),
        ("from omni_grpc.nn.activations import QuantizedActivation", True),
        ("from omni_grpc.nn.activations import Activation, norm", False),
        ("from omni_grpc.ops.dequant import dequantize", False),
        ("from omni_grpc.ops.quant import gelu_tanh", False),
    ],
)
def test_a_quantizing_import_is_seen(code: str, seen: bool) -> None:
    assert bool(list(quantizing_imports(code))) == seen


def test_attention_does_not_know_that_tokens_may_be_spread_over_ranks() -> None:
    tree = ast.parse(read(Path("omni_grpc/nn/attention.py")))
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not names & {"exchange", "whole", "gather", "spreads"}
