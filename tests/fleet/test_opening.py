"""What LoadModel may name, and with which settings."""

import json
import shutil

import pytest

from omni_grpc.config import EngineConfig
from omni_grpc.fleet import Opening
from omni_grpc.types.errors import CheckpointError, ConfigError, InvalidArgument, NotFound, PermissionDenied


@pytest.fixture
def roots(tmp_path, tiny_qwen_image):
    shutil.copytree(tiny_qwen_image, tmp_path / "models" / "qwen")
    shutil.copytree(tiny_qwen_image, tmp_path / "secret" / "other")
    (tmp_path / "models" / "link").symlink_to(tmp_path / "secret" / "other")
    return tmp_path


def opening(roots, **settings):
    config = EngineConfig.from_settings(
        model=str(roots / "secret" / "other"), served_model_name="first", model_roots=str(roots / "models"), **settings
    )
    return Opening(config, [config])


def test_a_folder_under_the_roots_is_opened_by_its_name(roots):
    config, checkpoint = opening(roots, max_queue=7, port=0).open("qwen", {})
    assert (checkpoint.name, checkpoint.path) == ("qwen", roots / "models" / "qwen")
    # a setting of a model is its own, one of the server is the server's
    assert (config.scheduler.max_queue, config.server.port) == (256, 0)


def test_a_checkpoint_can_be_loaded_under_another_name_and_with_settings(roots):
    config, checkpoint = opening(roots).open("fast", {"model": "qwen", "quantization": "int8", "max_num_seqs": 2})
    assert (checkpoint.name, checkpoint.path) == ("fast", roots / "models" / "qwen")
    assert (config.quantization.quantization, config.scheduler.max_num_seqs) == ("int8", 2)


def test_a_model_of_the_start_keeps_its_settings_but_for_those_that_are_given(roots):
    config, checkpoint = opening(roots, max_num_seqs=3, max_step_ms=9.0).open("first", {"max_num_seqs": 2})
    assert (checkpoint.name, checkpoint.path) == ("first", roots / "secret" / "other")
    assert (config.scheduler.max_num_seqs, config.scheduler.max_step_ms) == (2, 9.0)


@pytest.mark.parametrize("name", ["{roots}/secret/other", "../secret/other", "link", "{roots}/nowhere/at/all", "a\\b"])
def test_paths_outside_of_the_roots_are_refused_whether_or_not_they_are_there(roots, name):
    with pytest.raises(PermissionDenied) as refused:
        opening(roots).open(name.format(roots=roots), {})
    assert refused.value.failure.reason == "PATH_NOT_ALLOWED"
    assert str(roots) not in str(refused.value)


@pytest.mark.parametrize("name", ["nothing", "..", ".", ""])
def test_a_name_that_nothing_has_is_refused_with_those_that_there_are(roots, name):
    with pytest.raises(NotFound, match="this server can load first, qwen"):
        opening(roots).open(name, {})


def test_the_hub_is_for_those_that_the_operator_lets(roots):
    with pytest.raises(PermissionDenied, match="--load-from-hub"):
        opening(roots).open("org/name", {})
    config, checkpoint = opening(roots, load_from_hub=True).open("org/name", {})
    assert (config.model.model, checkpoint.name) == ("org/name", "org/name")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"port": 1}, "engine_options.port"),
        ({"state_dir": "/tmp/x"}, "engine_options.state_dir"),
        ({"max_input_bytes": 1}, "engine_options.max_input_bytes"),
        ({"diffusers_load_kwargs": {"trust_remote_code": True}}, "engine_options.diffusers_load_kwargs"),
        ({"served_model_name": "x"}, "engine_options.served_model_name"),
    ],
)
def test_settings_of_the_server_and_those_that_name_code_are_refused(roots, options, field):
    with pytest.raises(InvalidArgument) as refused:
        opening(roots).open("qwen", options)
    assert [violation.field for violation in refused.value.violations] == [field]


@pytest.mark.parametrize(
    "options",
    [
        {"lora": {"style": "/etc/passwd"}},
        {"lora": {"style": "{roots}/models/../secret/x.safetensors"}},
        {"gguf_model": ["transformer=/etc/x.gguf"]},
        {"presets": ["/etc/presets.yaml"]},
        {"recipe": "qwen-image-lightning-4=/etc/x.safetensors"},
        {"recipe": "wan2.2-t2v-lightning-4={roots}/models/a.safetensors,/etc/x.safetensors"},
        {"model": "{roots}/secret/other"},
    ],
)
def test_files_outside_of_the_roots_are_refused(roots, options):
    options = json.loads(json.dumps(options).replace("{roots}", str(roots)))
    with pytest.raises(PermissionDenied) as refused:
        opening(roots).open("qwen", options)
    assert refused.value.failure.reason == "PATH_NOT_ALLOWED"


def test_a_recipe_from_the_hub_is_refused_where_models_from_there_are(roots):
    with pytest.raises(PermissionDenied, match="names no files") as refused:
        opening(roots).open("qwen", {"recipe": "qwen-image-lightning-4"})
    assert refused.value.failure.reason == "HUB_NOT_ALLOWED"


def test_unknown_settings_and_damaged_checkpoints_say_what_is_wrong(roots):
    with pytest.raises(ConfigError, match="did you mean"):
        opening(roots).open("qwen", {"max_num_seq": 1})
    (roots / "models" / "qwen" / "model_index.json").unlink()
    with pytest.raises(CheckpointError):
        opening(roots).open("qwen", {})
