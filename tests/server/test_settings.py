"""Flags, environment, YAML: one tree, one order."""

from pathlib import Path

import pytest

from omni_grpc.cli import serve
from omni_grpc.config import EngineConfig, options
from omni_grpc.config.settings import settings
from omni_grpc.types.errors import ConfigError


def load(*argv: str, **environ: str):
    return settings(argv, environ, prog="serve", description="")


VALUES = {
    str: ("text", "text"),
    int: ("2000000", 2_000_000),
    float: ("2.5", 2.5),
    bool: ("true", True),
    dict: ('{"a": [1, null]}', {"a": [1, None]}),
    tuple: ("a, b,", ("a", "b")),
}
PAIRS = ("a=b=c", {"a": "b=c"})
"""For each type of setting, a value as it is written and as it is read."""


@pytest.fixture
def file(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "settings.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def test_a_flag_beats_the_environment_which_beats_the_file_which_beats_the_default(file):
    path = file("model: from-file\nscheduler:\n  max_queue: 1\n  max-num-seqs: 2\nport: 3\nmax_steps: 4\n")
    environ = {"OMNI_GRPC_MAX_QUEUE": "10", "OMNI_GRPC_PORT": "30", "OTHER": "x"}
    config = load("--config", path, "--max-queue", "100", **environ)
    assert config.model.model == "from-file"
    assert config.scheduler.max_queue == 100
    assert config.server.port == 30
    assert config.scheduler.max_num_seqs == 2
    assert config.limits.max_steps == 4
    assert config.limits.max_outputs == 8


CHECKED = {
    "port": ("65535", 65535),
    "http_port": ("65535", 65535),
    "rank_port": ("65535", 65535),
    "metrics_port": ("65535", 65535),
    "diffusion_attention_backend": ("CUDNN_ATTN", "CUDNN_ATTN"),
    "diffusion_attention_config": ('{"default": "sdpa"}', {"default": "sdpa"}),
    "admin_address": ("unix:admin.sock", "unix:admin.sock"),
    "ray_address": ("auto", "auto"),
    "state_url": ("postgresql://there/jobs", "postgresql://there/jobs"),
    "http_origins": ("https://a.example,*", ("https://a.example", "*")),
    "http_url": ("https://images.example", "https://images.example"),
}
"""Values of settings that are looked at as soon as they are there."""
COMPLETE = """
tls: {tls_cert: c.pem, tls_key: k.pem, tls_client_ca: a.pem, tls_require_client_cert: true}
identity: {jwt_issuer: i, jwt_audience: a, jwt_jwks: keys.json}
store: {state_dir: kept}
worker: {distributed_executor_backend: ray}
webhooks: {webhook_hosts: [example.com]}
http: {http_port: 8080}
metrics: {metrics_port: 9464}
"""
"""Settings that need each other; any one of them may be another."""


@pytest.mark.parametrize("option", list(options()), ids=lambda option: option.name)
def test_every_setting_has_a_flag(option, file):
    usual = (option.choices[-1],) * 2 if option.choices else PAIRS if option.pairs else VALUES[option.type]
    text, value = CHECKED.get(option.name, usual)
    base = ["--config", file(COMPLETE)]
    argv = [option.flag, text] if option.name == "model" else ["--model", "m", option.flag, text]
    assert option.of(load(*base, *argv)) == value
    given = {} if option.name == "model" else {"OMNI_GRPC_MODEL": "m"}
    assert option.of(load(*base, **given | {option.environment: text})) == value


def test_a_feature_is_off_where_nothing_of_it_is_set(file):
    config = load("--model", "m", "--no-enable-layerwise-offload", "--ignored-layers", "")
    assert (config.cache, config.quantization, config.loras, config.offload) == (None, None, None, None)
    assert {option.of(config) for option in options() if option.feature} == {None, False, ()}
    config = load("--config", file("model: m\nenable_layerwise_offload: true\nquantization:\n  quantization: int8\n"))
    assert config.offload.enable_layerwise_offload
    assert config.quantization.quantization == "int8"
    assert config.cache is None


@pytest.mark.parametrize(
    "argv",
    [["--lora", "a=x", "--lora", "b=y"], ["--lora", '{"a": "x", "b": "y"}'], ["--lora", "a=x", "--lora", '{"b": "y"}']],
)
def test_adapters_are_given_one_by_one_or_as_an_object(argv, file):
    assert load("--model", "m", *argv).loras.lora == {"a": "x", "b": "y"}
    assert load("--config", file("model: m\nlora:\n  a: x\n  b: y\n")).loras.lora == {"a": "x", "b": "y"}


@pytest.mark.parametrize("text", ["--vae-use-slicing", "--vae-use-slicing=true", "--vae-use-slicing=1"])
def test_a_switch_is_turned_on(text):
    assert load("--model", "m", text, "--port", "3").adapter.vae_use_slicing is True


@pytest.mark.parametrize("text", ["--no-vae-use-slicing", "--vae-use-slicing=false", "--vae-use-slicing=no"])
def test_a_switch_is_turned_off_again(text):
    assert load("--model", "m", text, OMNI_GRPC_VAE_USE_SLICING="true").adapter.vae_use_slicing is False


def test_a_json_object_is_a_mapping_in_a_file(file):
    config = load("--config", file("model: m\ncache_config:\n  threshold: 0.1\nvae_use_tiling: true\n"))
    assert (config.cache.cache_config, config.adapter.vae_use_tiling) == ({"threshold": 0.1}, True)


def test_a_json_object_is_a_path_for_each_value_on_the_command_line():
    argv = ["--cache-config.rel_l1_thresh", "0.2", "--cache-config.a.b=[1, 2]", "--cache-config.a.c", "text"]
    config = load("--model", "m", "--cache-config", '{"rel_l1_thresh": 0.1, "d": 4, "a": {"c": 3, "e": 5}}', *argv)
    assert config.cache.cache_config == {"rel_l1_thresh": 0.2, "d": 4, "a": {"b": [1, 2], "c": "text", "e": 5}}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model", "m", "--max-qeue", "3"], "unknown argument '--max-qeue'; did you mean --max-queue?"),
        (["--model", "m", "--max-qeue=3"], "did you mean --max-queue?"),
        (["--model", "m", "--max", "3"], "unknown argument '--max'"),
        (["--model", "m", "stray"], "unknown argument 'stray'; --help lists the flags"),
        (["--model", "m", "--max-queue", "many"], "--max-queue is 'many': expected int"),
        (["--model", "m", "--max-queue", "0"], "must be at least 1"),
        (["--model", "m", "--device", "tpu"], "expected one of auto, cpu, cuda"),
        (["--model", "m", "--vae-use-slicing=maybe"], "--vae-use-slicing is 'maybe': expected true or false"),
        (["--model", "m", "--cache-config", "{"], "--cache-config is '{': expected a JSON object"),
        (["--model", "m", "--cache-config", "[1]"], "expected a JSON object"),
        (["--model", "m", "--lora", "path"], "expected NAME=VALUE or a JSON object"),
        (["--model", "m", "--lora", "a=x", "--lora", "a=y"], "expected NAME=VALUE"),
        (["--model", "m", "--lora", '{"a": 1}'], "expected NAME=VALUE"),
        (["--model", "m", "--quantization", "fp3"], "--quantization is 'fp3': expected one of fp8, int8, gguf"),
        (["--config", "nothing.yaml"], "--config nothing.yaml: No such file or directory"),
    ],
)
def test_a_bad_command_line_is_refused_with_the_fix(argv, message):
    with pytest.raises(ConfigError) as caught:
        load(*argv)
    assert message in str(caught.value)


def test_a_bad_variable_is_refused():
    with pytest.raises(ConfigError) as caught:
        load("--model", "m", OMNI_GRPC_MAX_QUEU="3")
    fault = "the environment variable OMNI_GRPC_MAX_QUEU: unknown setting 'max_queu'; did you mean OMNI_GRPC_MAX_QUEUE?"
    assert str(caught.value) == fault
    assert [violation.field for violation in caught.value.violations] == ["max_queu"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modle: x", "did you mean 'model'"),
        ("model: [", "is not valid YAML"),
        ("- model", "must contain settings as `name: value`"),
        ("", "must contain settings as `name: value`"),
        ("1: x", "must contain settings as `name: value`"),
        ("model: a\nmodel: b", "'model' is given twice"),
        ("server:\n  max_queue: 3", "belongs to section 'scheduler'"),
        ("model: m\nmax_queue: true", "expected int"),
        ("model: !!python/object:os.system x", "is not valid YAML"),
    ],
)
def test_a_bad_file_is_refused(file, text, message):
    with pytest.raises(ConfigError) as caught:
        load("--config", file(text))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("model: m\nmax_qeue: 3", "{}, line 2: unknown setting 'max_qeue'; did you mean 'max_queue'?"),
        (
            "scheduler:\n  policy: fcfs\n  max-qeue: 3",
            "{}, line 3: unknown setting 'max_qeue'; did you mean 'max_queue'?",
        ),
        ("schedular: {{policy: fcfs}}", "{}, line 1: unknown setting 'schedular'; did you mean 'scheduler'?"),
        ("scheduler: {{1: 2}}", "{}, line 1: unknown setting '1'"),
        ("\nserver:\n  max_queue: 3", "{}, line 3: 'max_queue' belongs to section 'scheduler', not 'server'"),
        (
            "max_queue: 3\nscheduler:\n  max_queue: 3",
            "{}, line 3: 'max_queue' is set twice: at the top level and under its section",
        ),
        ("port: 1\nmax_queue: many", "--max-queue is 'many': expected int (max_queue is set by {}, line 2)"),
        ("model:\n  device: tpu", "--device is 'tpu': expected one of auto, cpu, cuda (device is set by {}, line 2)"),
        (
            "model: ''",
            "--model is '': must not be empty; give a checkpoint folder or ORG/NAME of the hub, or leave it out for "
            "the bundled model (model is set by {}, line 1)",
        ),
    ],
)
def test_an_error_says_where_in_the_file_it_is(file, text, fault):
    path = file(text.format())
    with pytest.raises(ConfigError) as caught:
        load("--config", path)
    assert str(caught.value) == fault.format(path)


def test_an_error_says_which_variable_it_is():
    with pytest.raises(ConfigError) as caught:
        load("--model", "m", OMNI_GRPC_MAX_QUEUE="many")
    where = "(max_queue is set by the environment variable OMNI_GRPC_MAX_QUEUE)"
    assert str(caught.value) == f"--max-queue is 'many': expected int {where}"
    with pytest.raises(ConfigError, match=r"set by the environment variable DIFFUSION_ATTENTION_BACKEND\)$"):
        load("--model", "m", DIFFUSION_ATTENTION_BACKEND="NONE")
    with pytest.raises(ConfigError) as caught:
        load("--model", "m", "--max-queue", "many", OMNI_GRPC_MAX_QUEUE="3")
    assert "set by" not in str(caught.value), "a flag wins, and is the source"


def test_a_setting_that_the_model_refuses_is_told_with_its_variable(monkeypatch, capsys):
    monkeypatch.setenv("OMNI_GRPC_BOUNDARY_RATIO", "0.5")
    assert serve.main(["--model", "demo", "--port", "0"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --boundary-ratio has no effect on QwenImagePipeline")
    assert line.endswith("(boundary_ratio is set by the environment variable OMNI_GRPC_BOUNDARY_RATIO)")


@pytest.mark.parametrize("name", [option.name for option in options() if option.type is str and not option.choices])
def test_an_empty_text_is_refused_by_its_field(name):
    with pytest.raises(ConfigError, match="must not be empty; ") as flag:
        load(f"--{name.replace('_', '-')}=")
    with pytest.raises(ConfigError, match="must not be empty; ") as keyword:
        EngineConfig.from_settings(**{name: " "})
    for caught in (flag, keyword):
        assert [violation.field for violation in caught.value.violations] == [name]


def test_help_shows_every_flag_with_its_default(capsys):
    with pytest.raises(SystemExit) as ended:
        load("--help")
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(option.flag in text for option in options())
    assert "(default: 50051)" in text


def test_the_version_is_told(capsys):
    from omni_grpc.types.version import __version__

    with pytest.raises(SystemExit):
        load("--version")
    assert capsys.readouterr().out.strip() == __version__


def test_the_operator_is_told_of_every_flag():
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
    assert [option.flag for option in options() if f"`{option.flag}`" not in page] == []
