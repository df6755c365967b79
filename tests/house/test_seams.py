"""What one room may know of another: who names models, who knows that activations may be quantized."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from .source import python_files, read

MODELS = re.compile(
    r"(?<![a-zA-Z])(?i:flux|wan|qwen|helios|z[._ -]?image)\d?(?![a-z])|(Flux|Wan|Qwen|Helios|ZImage)(?=[A-Z])"
)
ANY_MODEL = (
    *("omni_grpc/types", "omni_grpc/config", "omni_grpc/feature_rules", "omni_grpc/resolve", "omni_grpc/nn"),
    *("omni_grpc/pipeline", "omni_grpc/features", "omni_grpc/worker", "omni_grpc/engine", "omni_grpc/server"),
)
"""Files and folders that serve any model, and name none in their code."""

QUANTIZING = re.compile(r"(?<!de)quantiz|coded|_code_|attention_q", re.IGNORECASE)
"""How ops are called that make or take activations in 8 bits."""

QUANTIZES = ("omni_grpc/nn/activations.py", "omni_grpc/features/quant.py")
"""The files that may import such ops, or QuantizedActivation: the one place in nn, and the layers in 8 bits."""


def files(*places: str) -> Iterator[Path]:
    """The Python files at these places, each a file or a folder."""
    for place in places:
        yield from [Path(place)] if place.endswith(".py") else python_files(place)


def models_named(text: str) -> Iterator[str]:
    """Names of models in code: identifiers, and strings that are no docstrings."""
    tree = ast.parse(text)
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if id(node) in docs and isinstance(node, ast.Constant):
            continue
        found = {value for _, value in ast.iter_fields(node) if isinstance(value, str)}
        yield from (f"{getattr(node, 'lineno', 0)}: {value!r}" for value in found if MODELS.search(value))


def quantizing_imports(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("omni_grpc.ops", "omni_grpc.nn")):
            yield from (f"{node.lineno}: {alias.name}" for alias in node.names if QUANTIZING.search(alias.name))


def test_what_serves_any_model_names_none() -> None:
    paths = list(files(*ANY_MODEL))
    assert len(paths) > 80
    found = {str(path): named for path in paths if (named := list(models_named(read(path))))}
    assert found == {}


@pytest.mark.parametrize(
    "code",
    ["x = 'Wan: shift'", "class WanVae: ...", "flux = 1", "import omni_grpc.models.z_image", "def _helios(): ...",
     "f'{x} is Qwen-Image'", "diffusers.HeliosScheduler"],
)  # fmt: skip
def test_a_models_name_is_seen(code: str) -> None:
    assert list(models_named(code))


@pytest.mark.parametrize("code", ["wanted = 'a swan'", '"""As in FLUX."""', "influx = 1  # Wan", "raise E('unwanted')"])
def test_other_words_are_free(code: str) -> None:
    assert not list(models_named(code))


def test_one_place_in_nn_knows_that_activations_may_be_quantized() -> None:
    rooms = files("omni_grpc/nn", "omni_grpc/features", "omni_grpc/pipeline", "omni_grpc/worker", "models")
    found = {str(path): names for path in rooms if (names := list(quantizing_imports(read(path))))}
    assert set(found) == set(QUANTIZES), found


@pytest.mark.parametrize(
    ("code", "seen"),
    [
        ("from omni_grpc.ops.quant import quantize_rows", True),
        ("from omni_grpc.ops.attention_q import QuantizedTiles", True),
        ("from omni_grpc.ops.rope_heads import qk_norm_rope_quantize_heads", True),
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
