"""The request of each kind of generation, as the client sends it, and the options that a command line gives for it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from google.protobuf.message import Message

from omni_grpc.client.messages import audio_request, edit_request, image_request, only_model, video_request
from omni_grpc.types.errors import NotFound
from omni_grpc.types.json_text import read_json
from omni_grpc.types.request_options import AUDIO, EDIT, IMAGE, VIDEO
from omni_grpc.v1.model_pb2 import Model


def request_of(kind: str, model: str, prompt: str, options: Mapping[str, Any]) -> Message:
    """Raises InvalidArgument for values that cannot be sent, naming each field, and OSError for a file that cannot be
    read.
    """
    return _BUILD[kind](model, prompt, options)


def chosen_model(models: Sequence[Model], wanted: str | None) -> Model:
    """The model that is meant. Raises NotFound for one that is not there."""
    name = wanted or only_model(models)
    for model in models:
        if model.name == name:
            return model
    has = ", ".join(model.name for model in models)
    raise NotFound(f"model {name!r} is not served here; this server has {has}", reason="MODEL_NOT_FOUND")


def option_pair(text: str) -> tuple[str, Any]:
    """The type of a flag that takes NAME=VALUE: the value is JSON, or text where it is no JSON."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE, for example steps=20")
    try:
        return name, read_json(value)
    except ValueError:
        return name, value


def _edit(model: str, prompt: str, options: Any) -> Message:
    rest: Any = {name: value for name, value in options.items() if name != "images"}
    return edit_request(model, prompt, options["images"], rest)


_BUILD: Mapping[str, Callable[[str, str, Any], Message]] = {
    IMAGE: image_request,
    EDIT: _edit,
    VIDEO: video_request,
    AUDIO: audio_request,
}
