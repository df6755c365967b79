import dataclasses

import pytest

from omni_grpc.config import EngineConfig, options, sections
from omni_grpc.config.settings import from_environment, from_mapping, settings
from omni_grpc.types.errors import ConfigError


def test_every_setting_has_one_flat_name_and_a_help_text():
    names = [option.name for option in options()]
    assert len(names) == len(set(names))
    assert all(option.help for option in options())


def test_no_section_has_more_than_twelve_settings():
    sections = [option.section for option in options()]
    assert max(sections.count(section) for section in sections) <= 12


def test_flags_yaml_environment_and_python_fill_the_same_tree():
    python = EngineConfig.from_settings(model="m", max_queue=7, port=0, device="cpu")
    strings = EngineConfig.from_settings(model="m", max_queue="7", port="0", device="cpu")
    nested = from_mapping({"model": {"model": "m", "device": "cpu"}, "scheduler": {"max_queue": 7}, "port": 0})
    environment = from_environment(
        {"OMNI_GRPC_MODEL": "m", "OMNI_GRPC_MAX_QUEUE": "7", "OMNI_GRPC_PORT": "0", "OMNI_GRPC_DEVICE": "cpu", "X": "1"}
    )
    assert python == strings == EngineConfig.from_settings(**nested) == EngineConfig.from_settings(**environment)
    assert python.scheduler.max_queue == 7


def test_the_tree_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig.from_settings(model="m").server.port = 1


@pytest.mark.parametrize(
    "fill",
    [
        lambda name: EngineConfig.from_settings(model="m", **{name: 1}),
        lambda name: from_mapping({name: 1}),
        lambda name: from_mapping({"scheduler": {name: 1}}),
        lambda name: from_environment({f"OMNI_GRPC_{name.upper()}": "1"}),
    ],
)
def test_an_unknown_name_is_an_error_with_a_suggestion(fill):
    with pytest.raises(ConfigError, match=r"did you mean ('max_queue'|OMNI_GRPC_MAX_QUEUE)") as caught:
        fill("max_qeue")
    assert caught.value.reason == "UNKNOWN_SETTING"
    assert caught.value.violations[0].field == "max_qeue"


def test_a_setting_under_the_wrong_section_is_an_error():
    with pytest.raises(ConfigError, match="belongs to section 'scheduler'"):
        from_mapping({"server": {"max_queue": 3}})


def test_a_setting_that_is_there_twice_is_an_error():
    with pytest.raises(ConfigError, match="'max_queue' is set twice"):
        from_mapping({"max_queue": 3, "scheduler": {"max_queue": 4}})


def test_build_variables_are_not_settings():
    assert from_environment({"OMNI_GRPC_BUILD": "cpu", "OMNI_GRPC_CUDA_ARCHS": "90a"}) == {}


def test_every_setting_has_a_variable():
    for option in options():
        assert from_environment({option.environment: "1"}) == {option.name: "1"}


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("max_queue", "many", "expected int"),
        ("max_queue", 1.5, "expected int"),
        ("max_queue", True, "expected int"),
        ("max_queue", 0, "at least 1"),
        ("retention", float("nan"), "at least 0"),
        ("device", "tpu", "one of auto, cpu, cuda"),
        ("host", 5, "expected str"),
    ],
)
def test_a_bad_value_names_the_flag_the_value_and_the_rule(name, value, rule):
    with pytest.raises(ConfigError, match=rule) as caught:
        EngineConfig.from_settings(model="m", **{name: value})
    assert "--" + name.replace("_", "-") in str(caught.value)
    assert caught.value.violations[0].field == name


def test_optional_settings_take_none():
    assert EngineConfig.from_settings(model="m", max_pixels=None).limits.max_pixels is None


def test_without_a_model_the_bundled_one_is_taken_where_it_is_there(monkeypatch, tmp_path):
    monkeypatch.setattr(sections, "BUNDLED", tmp_path)
    assert EngineConfig.from_settings(port=1).model.model == str(tmp_path)
    assert EngineConfig.from_settings(model=None).model.model == str(tmp_path)
    assert EngineConfig.from_settings(model="m").model.model == "m"
    assert settings([], {}, prog="serve", description="").model.model == str(tmp_path)
    monkeypatch.setattr(sections, "BUNDLED", tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"no model: pass a checkpoint folder or .*--model DIR") as caught:
        settings([], {}, prog="serve", description="")
    assert caught.value.violations[0].field == "model"
