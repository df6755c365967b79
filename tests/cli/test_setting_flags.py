"""Settings as flags: the same words mean the same to a server and to a command that runs a model itself."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from omni_grpc.cli import main as cli
from omni_grpc.cli.generate import COMMANDS, _offline_options
from omni_grpc.config import Option, options
from omni_grpc.config.settings import given
from omni_grpc.types.errors import ConfigError
from tests.cli.conftest import Run

PROMPT = "a red circle"
BOOLEANS = {option.name: option for option in options() if option.type is bool}
NEEDED = {"edit": ["--image", "in.png"]}


def asked(command: str, *words: str) -> argparse.Namespace:
    """What a command that runs here takes these words for, with a prompt after them."""
    return cli._parser().parse_args([command, *words, PROMPT, "--out", "o.png", *NEEDED.get(command, [])])


def served(option: Option, *words: str) -> object:
    """What `serve` takes these words for, whichever settings go with it."""
    return given(words, {}, prog="serve", description="").values.get(option.name)


def offline(name: str) -> bool:
    return any(option.name == name for option in _offline_options())


def test_there_are_booleans_in_both_places() -> None:
    assert len(BOOLEANS) >= 7
    assert {name for name in BOOLEANS if offline(name)} >= {"enable_layerwise_offload", "vae_use_tiling"}


@pytest.mark.parametrize("name", BOOLEANS)
@pytest.mark.parametrize(
    ("form", "value"),
    [
        ("--{}", True), ("--{}=true", True), ("--{}=false", False), ("--{}=1", True), ("--{}=no", False),
        ("--{} true", True), ("--{} False", False), ("--no-{}", False),
    ],
)  # fmt: skip
def test_a_boolean_is_written_the_same_for_a_server_and_offline(name: str, form: str, value: bool) -> None:
    words = form.format(name.replace("_", "-")).split()
    assert served(BOOLEANS[name], *words) is value
    if offline(name):
        for command in COMMANDS:
            args = asked(command.name, *words)
            assert (getattr(args, name), args.prompt) == (value, PROMPT), "the flag took the prompt for its value"


@pytest.mark.parametrize("name", [name for name in BOOLEANS if offline(name)])
def test_a_boolean_that_is_neither_is_refused_in_the_same_words(name: str) -> None:
    flag = BOOLEANS[name].flag
    for refused in (lambda: served(BOOLEANS[name], f"{flag}=maybe"), lambda: asked("generate", f"{flag}=maybe")):
        with pytest.raises(ConfigError) as caught:
            refused()
        assert str(caught.value) == f"{flag} is 'maybe': expected true or false"


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--cache-config.rel_l1_thresh", "0.2"], "cache_config", {"rel_l1_thresh": 0.2}),
        (["--cache-config", '{"a": 1}', "--cache-config.b=2"], "cache_config", {"a": 1, "b": 2}),
        (["-dac.default.backend", "TORCH_SDPA"], "diffusion_attention_config", {"default": {"backend": "TORCH_SDPA"}}),
        (["--lora", "a=x", "--lora", "b=y"], "lora", {"a": "x", "b": "y"}),
        (["--ignored-layers", "a, b"], "ignored_layers", ("a", "b")),
        (["--layerwise-resident-blocks", "3"], "layerwise_resident_blocks", 3),
    ],
)
def test_other_settings_are_written_the_same_too(words: list[str], name: str, value: object) -> None:
    option = next(option for option in options() if option.name == name)
    assert served(option, *words) == getattr(asked("generate", *words), name) == value


async def test_booleans_are_turned_on_offline_by_their_flags_alone(run: Run, tmp_path: Path) -> None:
    done = await run(
        "generate", "--enable-layerwise-offload", "--batch-invariant", PROMPT, "--out", tmp_path / "o.png",
        "--model", "demo", "--width", 32, "--height", 32, "--steps", 1, "--device", "cpu", "--json", "--quiet",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert json.loads(done.out)["effective"]["batch_invariant"] is True
