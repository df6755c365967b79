"""How several models are named when a server is started."""

import pytest

from omni_grpc.config.settings import given
from omni_grpc.types.errors import ConfigError


def read(*argv, environ=None):
    return given(argv, environ or {}, prog="serve", description="")


@pytest.fixture
def yaml(tmp_path):
    def write(text):
        file = tmp_path / "settings.yaml"
        file.write_text(text)
        return "--config", str(file)

    return write


def test_model_is_given_several_times_on_the_command_line():
    one, two = read("--model", "a=/x/one", "--model", "org/two", "--max-num-seqs", "2", "--port", "7").configs()
    assert (one.model.model, one.model.served_model_name) == ("/x/one", "a")
    assert (two.model.model, two.model.served_model_name) == ("org/two", None)
    assert [config.scheduler.max_num_seqs for config in (one, two)] == [2, 2]
    assert [config.server.port for config in (one, two)] == [7, 7]


def test_one_model_may_have_its_name_in_front_too(tmp_path):
    (config,) = read("--model", "a=/x/one").configs()
    assert (config.model.model, config.model.served_model_name) == ("/x/one", "a")
    # a folder that is called so is a folder
    (folder := tmp_path / "a=b").mkdir()
    (config,) = read("--model", str(folder)).configs()
    assert (config.model.model, config.model.served_model_name) == (str(folder), None)


def test_a_file_lists_models_with_their_own_settings(yaml):
    file = yaml("""
max_num_seqs: 4
gpu_memory_budget: 40
models:
  - name: fast
    model: /x/one
    quantization: int8
  - name: long
    model: /x/two
    scheduler: {max_num_seqs: 1}
    worker: {data-parallel-size: 2, load_later: true}
""")
    one, two = read(*file).configs()
    assert (one.model.served_model_name, one.quantization.quantization, one.scheduler.max_num_seqs) == (
        "fast",
        "int8",
        4,
    )
    assert (two.model.served_model_name, two.quantization, two.scheduler.max_num_seqs) == ("long", None, 1)
    assert (two.worker.data_parallel_size, two.worker.load_later) == (2, True)
    assert [config.fleet.budget_bytes for config in (one, two)] == [40 << 30, 40 << 30]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("models: {a: b}", "models: expected a list"),
        ("models: [3]", "models: expected a list"),
        ("models: [{name: a}]", r"models\[0\]: has no `model:`"),
        ("models: [{model: /x, modle: /y}]", r"models\[0\]: unknown setting 'modle'.*did you mean 'model'"),
        ("models: [{model: /x, port: 1}]", "--port is a setting of the whole server"),
        ("models: [{model: /x, max_input_bytes: 1}]", "--max-input-bytes is a setting of the whole server"),
        ("served_model_name: x\nmodels: [{model: /x}]", "--served-model-name names one model"),
    ],
)
def test_what_is_wrong_with_a_list_of_models_is_said(yaml, text, said):
    with pytest.raises(ConfigError, match=said):
        read(*yaml(text)).configs()


def test_models_are_named_in_one_place(yaml):
    with pytest.raises(ConfigError, match="leave one of them out"):
        read(*yaml("models: [{model: /x}]"), "--model", "/y")


def test_what_is_for_one_model_says_so():
    with pytest.raises(ConfigError, match="takes a server"):
        read("--model", "a=/x", "--model", "b=/y").config()
