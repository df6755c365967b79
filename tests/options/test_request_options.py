"""The options of a request stand in one table, and all that repeats them agrees with it."""

import dataclasses
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from omni_grpc.cli import generate
from omni_grpc.client import messages, options
from omni_grpc.client.asked import asked_of
from omni_grpc.config.flags import SettingsParser
from omni_grpc.resolve.draft import make_draft, requested
from omni_grpc.types.errors import InvalidArgument
from omni_grpc.types.media import ImageFormat
from omni_grpc.types.request import Draft, GuidanceDraft, Task
from omni_grpc.types.request_options import (
    ALL,
    API_ONLY,
    AUDIO,
    EDIT,
    IMAGE,
    OPTIONS,
    SECONDS,
    VIDEO,
    checked_names,
    normalized,
    options_of,
)
from omni_grpc.v1 import generation_pb2

ROOT = Path(__file__).resolve().parents[2]
MESSAGES = {
    IMAGE: generation_pb2.GenerateImageRequest,
    EDIT: generation_pb2.EditImageRequest,
    VIDEO: generation_pb2.GenerateVideoRequest,
    AUDIO: generation_pb2.GenerateAudioRequest,
}
BY_HAND = {"model", "prompt", "task", "guidance", "inputs", "preview", "input_traits", "scheduler_config"}
"""Fields of a Draft that are no option by themselves: who makes a draft gives them."""


def field_of(kind, path):
    descriptor = MESSAGES[kind].DESCRIPTOR
    *parents, leaf = path.split(".")
    for parent in parents:
        descriptor = descriptor.fields_by_name[parent].message_type
    return descriptor.fields_by_name[leaf]


@pytest.mark.parametrize("kind", ALL)
def test_every_path_is_a_field_of_the_request(kind):
    for option in options_of(kind):
        field = field_of(kind, option.path)
        assert (field.enum_type is not None) == (option.type.choices is not None)
        assert (field.message_type is not None and field.message_type.name == "Duration") == (option.type is SECONDS)
    for path, of in API_ONLY.items():
        if kind in of:
            assert field_of(kind, path) is not None


def test_every_field_of_a_draft_is_an_option():
    drafted = {option.draft for option in OPTIONS if option.draft}
    own = {field.name for field in dataclasses.fields(Draft)} - BY_HAND
    guidance = {f"guidance.{field.name}" for field in dataclasses.fields(GuidanceDraft)}
    assert {path for path in drafted if not path.startswith("inputs.")} == own | guidance


def test_a_name_is_used_once_for_each_kind_and_never_again_for_another():
    for kind in ALL:
        names = [name for option in options_of(kind) for name in (option.name, *option.renamed)]
        assert len(names) == len(set(names))


def test_the_typed_keywords_are_those_of_the_table():
    for kind, sampling, all_options in (
        (IMAGE, options.ImageSampling, options.ImageOptions),
        (EDIT, options.EditSampling, options.EditOptions),
        (VIDEO, options.VideoSampling, options.VideoOptions),
        (AUDIO, options.AudioSampling, options.AudioOptions),
    ):
        names = {option.name for option in options_of(kind)} - {"images"}
        assert set(all_options.__annotations__) == names
        own = {option.name for option in options_of(kind) if not option.needs_server} - {"images"}
        assert set(sampling.__annotations__) == own


def test_the_generated_file_is_current():
    program = [sys.executable, "tools/gen_request_options.py", "--check"]
    environment = {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_option_that_is_added_gets_its_keyword(monkeypatch):
    """The generator reads the table: what is added there needs no other hand."""
    from tools import gen_request_options

    extra = dataclasses.replace(OPTIONS[0], name="sharpness", path="sampling.sharpness", draft="sharpness")
    before = gen_request_options.generate()
    monkeypatch.setattr(gen_request_options, "OPTIONS", (*OPTIONS, extra))
    assert "sharpness: str | None" in gen_request_options.generate()
    assert "sharpness" not in before


def test_every_option_has_an_argument_of_its_own_on_the_command_line():
    parser = SettingsParser()
    generate.add_commands(parser.add_subparsers())
    commands = parser._subparsers._group_actions[0].choices
    for command in generate.COMMANDS:
        dests = {action.dest for action in commands[command.name]._actions}
        assert {option.name for option in options_of(command.kind) if option.cli} <= dests


@pytest.mark.parametrize(
    ("old", "new", "value"),
    [
        ("guidance_start", "guidance_interval_start", 0.25),
        ("guidance_end", "guidance_interval_end", 0.75),
        ("true_cfg_scale_2", "guidance_scale_low_noise", 2.0),
        ("preview_every", "preview_every_steps", 2),
        ("preview_max_edge", "preview_max_edge_px", 64),
    ],
)
def test_an_earlier_name_is_taken_with_a_warning(old, new, value):
    with pytest.warns(DeprecationWarning, match=f"'{old}' is called '{new}' now"):
        before = messages.image_request("toy", "x", {old: value, "request_id": "r"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert messages.image_request("toy", "x", {new: value, "request_id": "r"}) == before


@pytest.mark.parametrize(
    ("name", "value", "plain"),
    [
        ("steps", np.int64(3), 3),
        ("width", np.uint8(64), 64),
        ("seeds", np.array([1, 2]), (1, 2)),
        ("guidance_scale", np.float32(2.5), 2.5),
        ("true_cfg_scale", 4, 4.0),
        ("output_format", "png", ImageFormat.PNG),
        ("loras", {"a": 1}, {"a": 1.0}),
    ],
)
def test_what_stands_for_a_plain_value_becomes_one(name, value, plain):
    faults = {}
    found = normalized(IMAGE, {name: value}, faults)
    assert (found, faults) == ({name: plain}, {})
    assert type(found[name]) is type(plain)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", True), ("steps", "5"), ("steps", 2.0), ("steps", [3]), ("seed", "5"), ("seed", True), ("seeds", "12"),
        ("guidance_scale", "high"), ("guidance_scale", True), ("guidance_scale", [1.0]), ("negative_prompt", 3),
        ("output_format", "gif"), ("loras", ["a"]), ("extra", [1]), ("run_timeout", float("nan")),
    ],
)  # fmt: skip
def test_what_an_option_cannot_be_is_a_fault_at_its_path(name, value):
    faults = {}
    assert normalized(IMAGE, {name: value}, faults) == {}
    (path,) = faults
    assert path == next(option.path for option in OPTIONS if option.name == name)
    assert repr(value) in faults[path]


def test_options_that_exclude_each_other_are_refused_by_client_and_draft():
    with pytest.raises(InvalidArgument, match=r"sampling\.seed, sampling\.seeds are both set"):
        messages.image_request("toy", "x", {"seed": 1, "seeds": [2]})
    refused = {}
    make_draft(AUDIO, "toy", "x", Task.TEXT_TO_AUDIO, {"end": 3.0, "duration": 1.0}, refused.__setitem__)
    assert "end, duration" in refused


def test_an_end_becomes_a_duration():
    refused = {}
    draft = make_draft(AUDIO, "toy", "x", Task.TEXT_TO_AUDIO, {"start": 1.0, "end": 3.5}, refused.__setitem__)
    assert (draft.start, draft.duration, refused) == (1.0, 2.5, {})
    make_draft(AUDIO, "toy", "x", Task.TEXT_TO_AUDIO, {"start": 4.0, "end": 3.5}, refused.__setitem__)
    assert "start, end" in refused


def test_names_that_are_none_are_refused_with_the_nearest():
    with pytest.raises(TypeError, match="unknown option 'widht'; did you mean 'width'"):
        checked_names(IMAGE, {"widht": 64})


def test_an_adapter_has_a_scale_for_each_component_in_every_form():
    """In a mapping of the client, in a draft, and in what is written into files of both."""
    loras = {"fast@transformer": 3.0, "fast@transformer_2": 1.5, "style": 0.5}
    message = messages.image_request("toy", "x", {"loras": loras})
    asked = [(lora.lora_id, lora.target, lora.scale) for lora in message.sampling.loras]
    assert asked == [("fast", "transformer", 3.0), ("fast", "transformer_2", 1.5), ("style", "", 0.5)]
    draft = make_draft(IMAGE, "toy", "x", Task.TEXT_TO_IMAGE, {"loras": loras}, lambda path, why: pytest.fail(why))
    assert [(lora.lora_id, lora.target, lora.scale) for lora in draft.loras] == asked
    assert requested(draft, "toy").options["loras"] == asked_of(message).options["loras"] == loras
