"""Decodes the media of one request; the limits apply to all of them together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from omni_grpc import media_in
from omni_grpc.config import LimitsConfig
from omni_grpc.media_in import MediaLimits
from omni_grpc.media_in.refusal import TOO_LARGE, Warnings, refusal, together
from omni_grpc.types.errors import InvalidArgument, Violation
from omni_grpc.types.media import TRANSPARENT_MASK, DecodedInput, ImageInput, Inputs, VideoInput, field_of
from omni_grpc.types.results import RequestWarning

DECODE: Mapping[str, Callable[..., tuple[DecodedInput, Warnings]]] = {
    "images": media_in.decode_image,
    "first_frame": media_in.decode_image,
    "last_frame": media_in.decode_image,
    "reference_images": media_in.decode_image,
    "mask": media_in.decode_mask,
    TRANSPARENT_MASK: media_in.decode_transparent_mask,
    "source_video": media_in.decode_video,
    "control_video": media_in.decode_video,
    "mask_video": media_in.decode_video,
    "audio": media_in.decode_audio,
}
"""For each field of Inputs, and other inputs that go to one, how it is decoded."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """One encoded input: its path in the request, the field of Inputs it goes to, and its bytes or a data: URI."""

    path: str
    name: str
    data: bytes = b""
    uri: str = ""
    mime_type: str = ""
    sha256: bytes = b""


def decode(files: Sequence[InputFile], config: LimitsConfig) -> tuple[Inputs, Warnings]:
    """The decoded files, and how they were converted. Blocks.

    Raises InvalidArgument with the path of every file that is refused. The limits of a single file also apply to the
    sum of all sizes.
    """
    limits = MediaLimits.of(config)
    refusals: list[InvalidArgument] = []
    decoded: dict[str, list[DecodedInput]] = {}
    warnings: list[RequestWarning] = []
    size = pixels = 0
    for file in files:
        try:
            data, mime_type = _bytes(file, limits)
            value, notes = DECODE[file.name](data, mime_type, limits=limits, field=file.path)
        except InvalidArgument as error:
            refusals.append(error)
            continue
        except MemoryError:
            rule = "needs more memory than a decoder may take; send a smaller one"
            refusals.append(refusal(file.path, TOO_LARGE, rule))
            continue
        size += len(data)
        _check_sum(files, size, limits.max_bytes, "bytes")
        pixels += _pixels(value)
        _check_sum(files, pixels, limits.max_video_pixels, "pixels")
        decoded.setdefault(field_of(file.name), []).append(value)
        warnings += notes
    if refusals:
        raise together(refusals)
    return _inputs(decoded), tuple(warnings)


def _bytes(file: InputFile, limits: MediaLimits) -> tuple[bytes, str]:
    data, mime_type = file.data, file.mime_type
    if file.uri:
        data, declared = media_in.read_uri(file.uri, limits=limits, field=file.path)
        mime_type = mime_type or declared
    media_in.check_sha256(data, file.sha256, field=file.path)
    return data, mime_type


def _check_sum(files: Sequence[InputFile], total: int, most: int, unit: str) -> None:
    if total <= most:
        return
    names = ", ".join(file.path for file in files)
    rule = f"have more than {most} {unit} in total; send fewer or smaller ones"
    raise InvalidArgument(f"{names}: {rule}", reason="INPUTS_TOO_LARGE", violations=(Violation(names, rule),))


def _pixels(value: DecodedInput) -> int:
    match value:
        case ImageInput():
            return value.width * value.height
        case VideoInput():
            return value.width * value.height * value.num_frames
    return 0


def _inputs(decoded: Mapping[str, list[DecodedInput]]) -> Inputs:
    several = ("images", "reference_images")
    values: dict[str, Any] = {name: tuple(found) if name in several else found[0] for name, found in decoded.items()}
    return Inputs(**values)
