"""What features declare without torch: settings are checked by walking the table, findings go to replies by name."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import pkgutil
from pathlib import Path

import pytest

import omni_grpc.feature_rules
from omni_grpc.cli.listing import native_models
from omni_grpc.config import EngineConfig
from omni_grpc.feature_rules import table
from omni_grpc.feature_rules.base import FeatureRules
from omni_grpc.feature_rules.table import BY_NAME, FEATURES, is_on
from omni_grpc.resolve.settings import check_settings
from omni_grpc.types.errors import ConfigError
from omni_grpc.types.findings import ModelExecution, WorkerFindings
from omni_grpc.types.results import Effective
from omni_grpc.v1 import event_pb2
from tests.toy import toy_checkpoint

FOLDER = Path(omni_grpc.feature_rules.__file__).parent
RULES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in ("__init__", "base", "table", "ranks"))
"""Without those that ranks turn on, and no setting alone."""


def config(**settings: object) -> EngineConfig:
    return EngineConfig.from_settings(model="toy", **settings)


def test_every_file_of_rules_is_in_the_table_under_its_name() -> None:
    assert sorted(BY_NAME) == RULES
    assert len(BY_NAME) == len(FEATURES)


@pytest.mark.parametrize("name", RULES)
def test_rules_know_no_other_features_rules(name: str) -> None:
    tree = ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {module for module in imported if module and "feature_rules" in module} == {"omni_grpc.feature_rules.base"}


@pytest.mark.parametrize("feature", [feature for feature in FEATURES if feature.apply], ids=lambda it: it.name)
def test_what_applies_a_feature_is_there(feature: FeatureRules) -> None:
    apply = pkgutil.resolve_name(feature.apply)
    assert apply.__module__.split(".")[:3] == ["omni_grpc", "features", feature.name]
    assert list(inspect.signature(apply).parameters) == ["module", "config", "context"]


def test_a_feature_in_the_table_is_asked_and_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = FeatureRules(
        name="mine",
        section=lambda config: config.model,
        faults=lambda config, checkpoint: {"dtype": f"is not for {checkpoint.spec.name}"},
        column="mine",
        variants=lambda spec: {"a": {}, "b": {"max_queue": 1}},
    )
    check_settings(config(), toy_checkpoint())
    monkeypatch.setattr(table, "FEATURES", (*FEATURES, mine))
    monkeypatch.setattr("omni_grpc.cli.listing.FEATURES", (mine,))
    with pytest.raises(ConfigError, match="--dtype is not for ToyPipeline") as error:
        check_settings(config(), toy_checkpoint())
    assert [violation.field for violation in error.value.violations] == ["dtype"]
    assert native_models(features=True)[0]["features"]["mine"] == []


def test_a_feature_is_off_beside_one_that_it_excludes_and_cannot_be_asked_for() -> None:
    graphs = BY_NAME["cuda_graphs"]
    assert is_on(graphs, config())
    assert not is_on(graphs, config(enable_layerwise_offload=True))
    check_settings(config(enable_layerwise_offload=True, cuda_graph_tokens=0), toy_checkpoint())
    with pytest.raises(ConfigError, match="--cuda-graph-tokens does not work with --enable-layerwise-offload"):
        check_settings(config(enable_layerwise_offload=True, cuda_graph_tokens=64), toy_checkpoint())


def test_excluded_features_are_features() -> None:
    for feature in FEATURES:
        assert set(feature.excludes) <= set(BY_NAME)
        assert bool(feature.excludes) == bool(feature.setting)


def test_how_a_model_is_executed_has_the_same_names_from_the_worker_to_the_reply() -> None:
    names = {field.name for field in dataclasses.fields(ModelExecution)}
    assert names <= set(event_pb2.EffectiveParams.DESCRIPTOR.fields_by_name)
    assert issubclass(Effective, ModelExecution)
    found = WorkerFindings(attention_backend="X", quantized_layers={"int8": 3}, kept_layers=1, batch_invariant=True)
    assert found.execution() == {name: getattr(found, name) for name in names}
