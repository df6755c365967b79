"""What a request asks for, read back from its message: the part of it that is written into the files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from omni_grpc.types.lora import joined
from omni_grpc.types.request_options import AUDIO, EDIT, IMAGE, VIDEO, RequestOption, options_of
from omni_grpc.types.requested import Requested, traits
from omni_grpc.v1.generation_pb2 import (
    EditImageRequest,
    GenerateAudioRequest,
    GenerateImageRequest,
    GenerateVideoRequest,
)
from omni_grpc.v1.media_pb2 import MediaInput
from omni_grpc.wire.cache_choice import read_choice

KINDS: Mapping[type[Message], str] = {
    GenerateImageRequest: IMAGE,
    EditImageRequest: EDIT,
    GenerateVideoRequest: VIDEO,
    GenerateAudioRequest: AUDIO,
}
"""Message -> the kind of generation that it asks for."""


def asked_of(request: Any) -> Requested:
    """What a request asks for, without what is about its job. Called before its media are uploaded: it hashes them."""
    kind = KINDS[type(request)]
    options: dict[str, Any] = {}
    inputs: dict[str, list[Mapping[str, str]]] = {}
    for option in options_of(kind):
        value = None if option.of_job else _value(request, option)
        if value is None:
            continue
        if option.type.name in ("MEDIA", "MEDIA_LIST"):
            inputs[option.name] = [
                medium_traits(one) for one in (value if option.type.name == "MEDIA_LIST" else [value])
            ]
        else:
            options[option.name] = value
    return Requested(kind=kind, model=request.model, prompt=request.prompt, options=options, inputs=inputs)


def medium_traits(media: MediaInput) -> Mapping[str, str]:
    """What tells a medium from others."""
    source = media.WhichOneof("source")
    return traits(**{source: getattr(media, source)}) if source else {}


def _value(request: Message, option: RequestOption) -> Any:
    """The value of an option as JSON, None where it is not set."""
    *parents, leaf = option.path.split(".")
    message: Any = request
    for parent in parents:
        if not message.HasField(parent):
            return None
        message = getattr(message, parent)
    field = message.DESCRIPTOR.fields_by_name[leaf]
    value = getattr(message, leaf)
    if not (value if field.is_repeated or not field.has_presence else message.HasField(leaf)):
        return None
    match option.type.name:
        case "SECONDS":
            return value.ToTimedelta().total_seconds()
        case "EXTRA":
            return MessageToDict(value)
        case "LORAS":
            return {joined(lora.lora_id, lora.target): lora.scale for lora in value}
        case "CACHE":
            return read_choice(value)
        case "CHOICE":
            names = field.enum_type.values_by_number
            return names[value].name.removeprefix(names[0].name.removesuffix("UNSPECIFIED"))
        case "SEEDS" | "NUMBERS":
            return list(value)
    return value
