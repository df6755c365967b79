"""What a feature, a file or folder of omni_grpc/features, has to look like: one function for the outside, no model, no
other feature.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import omni_grpc.features
from omni_grpc.checkpoint.registry import specs
from omni_grpc.feature_rules import ranks
from omni_grpc.feature_rules.base import FeatureRules
from omni_grpc.feature_rules.table import FEATURES as RULES
from omni_grpc.worker.edits import AFTER, AROUND, BEFORE

OF_RANKS = [value for value in vars(ranks).values() if isinstance(value, FeatureRules)]
FOLDER = Path(omni_grpc.features.__file__).parent
FEATURES = sorted(
    found.stem
    for found in FOLDER.iterdir()
    if found.name != "__init__.py" and (found.suffix == ".py" or found.joinpath("__init__.py").is_file())
)
FAMILIES = sorted({spec.family for spec in specs().values()})

WORDS: Mapping[str, str] = {
    "step_cache": r"(step|tea|block)[ _-]?cache",
    "quant": r"(?<!u)int8|fp8",
    "gguf": r"gguf",
    "lora": r"(?<![a-z])lora|adapter(?!config)",
    "layerwise_offload": r"offload",
    # Context has a field batch_invariant, which whatever chooses by size honours
    "batch_invariant": r"RowwiseLinear|features[. ]+batch_invariant",
    # Attention has an argument skip_sequence_parallel, whatever honours it
    "sequence_parallel": r"(?<!skip_)sequence[ _-]?parallel",
    # every other one may edit attentions: what it is spoken of by is what it chooses
    "attention": r"attention[ _-]backend|PreciseAttention|per[ _-]role",
    "tensor_parallel": r"tensor[ _-]?parallel",
    "ulysses": r"(?<!axis\.)ulysses",
}
"""How a feature is spoken of. One that has no entry is spoken of by its name."""

SCHEMES = ("quant", "gguf")
"""Features that are quantisation, of which the others do not speak."""

OTHER_MODELS = r"flux|wan_?\d?|z_?image|helios|hunyuan|ltx|cogvideo|stable[ _-]?(diffusion|audio)|sana|mochi"
"""Families that diffusers has, whether or not they are native here."""


def named(feature: str, text: str) -> Iterator[str]:
    """The lines that name a model or another feature. What the configuration calls its sections is free."""
    others = [pattern for name, pattern in patterns().items() if name != feature]
    others += [] if feature in SCHEMES else [r"quanti[sz]"]
    models = [re.escape(family).replace("_", "[ _-]?") for family in FAMILIES]
    words = re.compile(rf"\b({OTHER_MODELS}|{'|'.join(models)})(?![a-z])|{'|'.join(others)}", re.IGNORECASE)
    for number, line in enumerate(text.splitlines(), 1):
        if match := words.search(line):
            yield f"{number}: {match[0]} in {line.strip()!r}"


def patterns() -> Mapping[str, str]:
    return {name: WORDS.get(name, re.escape(name).replace("_", "[ _-]?")) for name in (*FEATURES, *WORDS)}


def files(feature: str) -> list[Path]:
    """Its files: those of a folder, or one."""
    return sorted((FOLDER / feature).rglob("*.py")) or [FOLDER / f"{feature}.py"]


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_names_no_model_and_no_other_feature(feature: str) -> None:
    found = {file.name: list(named(feature, file.read_text(encoding="utf-8"))) for file in files(feature)}
    assert not any(found.values()), found


@pytest.mark.parametrize(
    ("feature", "line"),
    [
        ("step_cache", "if spec.family == 'qwen_image':"),
        ("step_cache", "# Qwen-Image has two streams"),
        ("step_cache", "# as FLUX does"),
        ("step_cache", "if isinstance(linear, QuantizedLinear):"),
        ("step_cache", "state.request.loras  # LoRA"),
        ("quant", "from omni_grpc.features.lora import LoraLinear"),
        ("quant", "# or from a GGUF file"),
        ("gguf", "# like int8"),
        ("quant", "if config.offload is not None:"),
        ("lora", "# the base may be quantised"),
        ("lora", "stack.wrap(StepCache())"),
        ("layerwise_offload", "tea_cache"),
        ("layerwise_offload", "sequence_parallel.apply"),
    ],
)
def test_a_name_is_recognised(feature: str, line: str) -> None:
    assert list(named(feature, line))


@pytest.mark.parametrize("line", ["torch.uint8", "exploration", "influx of rows", "block = stack[0]", "wanted"])
def test_other_words_are_free(line: str) -> None:
    assert not list(named("tensor_parallel", line))


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_is_one_function_of_module_config_and_context(feature: str) -> None:
    module = importlib.import_module(f"omni_grpc.features.{feature}")
    signature = inspect.signature(module.apply)
    # one that edits denoisers may have another function for the rest of a pipeline
    whole = feature in {rules.name for rules in AROUND} - {rules.name for rules in AFTER}
    named = [name for name, one in signature.parameters.items() if one.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert named == ["pipeline" if whole else "module", "config", "context"]
    # what a benchmark turns off to see what it brings
    assert set(signature.parameters) - set(named) <= {"overlap"}
    assert signature.return_annotation == "None"
    if (FOLDER / feature).is_dir():
        functions = [name for name in module.__all__ if inspect.isfunction(getattr(module, name))]
    else:
        functions = [
            node.name
            for node in ast.parse((FOLDER / f"{feature}.py").read_text(encoding="utf-8")).body
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
        ]
    assert functions == ["apply"], "the other functions are private"


def test_every_feature_is_in_the_list_that_says_the_order() -> None:
    known = {feature.name for feature in (*RULES, *OF_RANKS) if feature.apply}
    assert {feature.name for feature in (*BEFORE, *AFTER, *AROUND)} == known
    applied = [feature.apply.partition(":")[0].rpartition(".")[2] for feature in (*BEFORE, *AFTER)]
    assert len(set(applied)) == len(applied)
    order = [name for name in (*SCHEMES, "layerwise_offload", "lora", "step_cache") if name in applied]
    assert order == [name for name in applied if name in order], "weights are wrapped from the inside to the outside"
    assert set(applied) <= set(FEATURES)
    assert set(order) == {*SCHEMES, "layerwise_offload", "lora", "step_cache"}
