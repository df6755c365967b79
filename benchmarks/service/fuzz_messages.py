"""Bad requests: valid messages of every rpc, then fields at their extremes, bytes that are broken, odd metadata.

Case n of a seed is the same in every run, whatever was sent before it, but for the ids that a server has given out.
"""

from __future__ import annotations

import base64
import dataclasses
import random
import string
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from google.protobuf import duration_pb2, struct_pb2, timestamp_pb2
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from omni_grpc.v1 import (
    admin_pb2,
    artifact_pb2,
    generation_pb2,
    job_pb2,
    model_pb2,
)

FILES: tuple[Any, ...] = (generation_pb2, job_pb2, artifact_pb2, model_pb2, admin_pb2)
LARGE = 1 << 20
"""Bytes of the longest texts; few are so long."""
MANY = 3000
"""Entries of the longest lists and maps."""
WEIGHTS = {
    **dict.fromkeys(("GenerateImage", "EditImage", "GenerateVideo", "CreateJob"), 6),
    **dict.fromkeys(("GenerateAudio", "WatchJob", "WatchJobs", "ListJobs", "UploadAsset", "DownloadArtifact"), 3),
}
"""Rpcs with more to go wrong; any other counts as 1."""
STOPPING = ("UnloadModel", "Sleep", "Drain")
"""Rpcs that do no harm by ending what the other calls ask for: they name what is not there."""

FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-320, 1e308, -1e308, float("nan"), float("inf"), float("-inf"))
TEXTS = (
    "",
    " ",
    "\0",
    "a\0b",
    "../../etc/passwd",
    "%s%n{0}${x}",
    "\u202e\u200b\ufeff",
    "\U0001f600" * 40,
    "\ud7ff\ue000\uffff",
    "x" * 129,
    "-" * 5000,
    "W10=",
    "data:image/png;base64,@@@",
    "https://127.0.0.1:1/x",
    "file:///etc/passwd",
    "[" * 20_000,
    "9" * 5000,
)
NANOS = (0, -1, 1, 999_999_999, 1_000_000_000, -(1 << 31), (1 << 31) - 1)
BYTES = (b"", b"\0", b"\xff" * 31, b"\xff" * 32, b"\x89PNG\r\n\x1a\n", bytes(range(256)) * 8)
TOKENS = (
    b"",
    b"\xff\xfe",
    b"null",
    b"{}",
    b'[1,"x"]',
    b'[1,"x","y","z"]',
    b'["nan","x","y"]',
    b"[NaN,{},[]]",
    b'[1e999,"x","y"]',
    b"[1" + b"0" * 400 + b',"x","y"]',
    b"[1" + b"0" * 5000 + b',"x","y"]',
    b"[" * 100_000,
    b'{"a":' * 20_000,
    b'[1,"\\ud800","y"]',
)
"""What a page token may be once its base64 is undone."""
_RANGES = {
    FieldDescriptor.TYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.TYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.TYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.TYPE_UINT64: (0, (1 << 64) - 1),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Known:
    """What a server has, so that some requests get past the first checks."""

    model: str
    job_id: str = ""
    artifact_id: str = ""
    asset_id: str = ""
    page_token: str = ""
    picture: bytes = b""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One call: its messages as bytes, its metadata, and how they were made."""

    method: MethodDescriptor
    payloads: tuple[bytes, ...]
    metadata: tuple[tuple[str, str | bytes], ...]
    how: str

    @property
    def path(self) -> str:
        return f"/{self.method.containing_service.full_name}/{self.method.name}"


def methods() -> list[MethodDescriptor]:
    """Every rpc of the API."""
    return [
        method for file in FILES for service in file.DESCRIPTOR.services_by_name.values() for method in service.methods
    ]


def case(seed: int, index: int, known: Known) -> Case:
    """Call `index` of a seed."""
    rng = random.Random(f"{seed}:{index}")
    offered = methods()
    method = rng.choices(offered, [WEIGHTS.get(method.name, 1) for method in offered])[0]
    message = valid(method, known, rng)
    how, metadata = "valid", ()
    kind = rng.random()
    if kind < 0.75:
        how = "fields"
        for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
            _aimed(message, rng) if rng.random() < 0.1 else mutate(message, known, rng)
    data = message.SerializeToString()
    if kind >= 0.8:
        how, data = damaged(data, rng)
    if method.name in STOPPING:
        data = _elsewhere(method, data)
    payloads = _stream(data, known, rng) if method.client_streaming else (data,)
    if rng.random() < 0.1:
        how, metadata = f"{how}, metadata", odd_metadata(rng)
    return Case(method=method, payloads=payloads, metadata=metadata, how=how)


def _elsewhere(method: MethodDescriptor, data: bytes) -> bytes:
    """The same request for a model and a replica that no server has, or the bytes as they are if they are none."""
    message: Any = GetMessageClass(method.input_type)()
    try:
        message.ParseFromString(data)
    except DecodeError:
        return data
    message.model = "nowhere"
    if method.name == "Drain":
        message.replica = 99
    return cast("bytes", message.SerializeToString())


# --- valid messages ---------------------------------------------------------------------------------------------------


def valid(method: MethodDescriptor, known: Known, rng: random.Random) -> Message:
    """A request that the server takes, or would if its model had the task."""
    message: Any = GetMessageClass(method.input_type)()
    _identify(message, known)
    match method.name:
        case "CreateJob":
            arm = rng.choice(("generate_image", "generate_image", "edit_image", "generate_video", "generate_audio"))
            _ask(getattr(message, arm), known, rng)
        case "GenerateImage" | "EditImage" | "GenerateVideo" | "GenerateAudio":
            _ask(message, known, rng)
        case "WatchJobs":
            message.job_ids.append(known.job_id)
        case "DeleteJob" | "DeleteArtifact" if rng.random() < 0.9:
            message.Clear()  # what is there is for the other calls
        case "UploadAsset":
            message.header.mime_type, message.header.size_bytes = "image/png", len(known.picture)
    return message


def _identify(message: Any, known: Known) -> None:
    """Fields that name something get the name of something that is there."""
    for name in message.DESCRIPTOR.fields_by_name:
        if isinstance(value := getattr(known, name, None), str):
            setattr(message, name, value)
    if "page_token" in message.DESCRIPTOR.fields_by_name:
        message.page_token = ""


def _ask(message: Any, known: Known, rng: random.Random) -> None:
    message.model, message.prompt = known.model, "a red circle"
    message.sampling.steps, message.sampling.seed = 1, rng.randrange(1 << 32)
    for side in ("width", "height"):
        if side in message.DESCRIPTOR.fields_by_name:
            setattr(message, side, 32)
    match message:
        case generation_pb2.EditImageRequest():
            _fill(message.images.add(), known, rng)
        case generation_pb2.GenerateVideoRequest():
            message.num_frames = 5
            if rng.random() < 0.3:
                _fill(message.first_frame, known, rng)


def _fill(medium: Any, known: Known, rng: random.Random) -> None:
    if rng.random() < 0.3 and known.asset_id:
        medium.asset_id = known.asset_id
    else:
        medium.data = known.picture


# --- fields at their extremes -----------------------------------------------------------------------------------------


def mutate(message: Message, known: Known, rng: random.Random, depth: int = 0) -> None:
    """Changes one field of a message, or of a message inside it."""
    fields = message.DESCRIPTOR.fields
    if not fields:
        return
    field = rng.choice(fields)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        _mutate_map(getattr(message, field.name), field, rng)
    elif field.is_repeated:
        _mutate_list(getattr(message, field.name), field, known, rng, depth)
    elif field.message_type is not None:
        _mutate_message(getattr(message, field.name), known, rng, depth)
    elif rng.random() < 0.1:
        message.ClearField(field.name)
    else:
        setattr(message, field.name, extreme(field, known, rng, long=depth == 0))


def _aimed(message: Any, rng: random.Random) -> None:
    """Changes what lies too deep to be hit by chance, or is text with a form of its own."""
    names = message.DESCRIPTOR.fields_by_name
    if "page_token" in names:
        message.page_token = base64.urlsafe_b64encode(rng.choice(TOKENS)).decode()
    elif "sampling" in names:
        _mutate_struct(message.sampling.extra, rng)
    elif arm := message.WhichOneof("task") if "generate_image" in names else None:
        _aimed(getattr(message, arm), rng)


def _mutate_message(message: Any, known: Known, rng: random.Random, depth: int) -> None:
    message.SetInParent()
    match message:
        case duration_pb2.Duration() | timestamp_pb2.Timestamp():
            message.seconds = rng.choice((0, 1, -1, 315_576_000_001, 1 << 40, (1 << 63) - 1, -(1 << 63)))
            message.nanos = rng.choice(NANOS)
        case struct_pb2.Struct():
            _mutate_struct(message, rng)
        case _:
            for _ in range(rng.choice((1, 1, 2, 4))):
                mutate(message, known, rng, depth + 1)


def _mutate_struct(message: struct_pb2.Struct, rng: random.Random) -> None:
    inner: Any = message
    for _ in range(rng.choice((0, 1, 5, 28, 31, 40, 100))):
        inner = inner.fields[rng.choice(("guidance_scale", "x", ""))].struct_value
    value = inner.fields[rng.choice(("prompt_embeds", "generator", "num_inference_steps", "y"))]
    match rng.randrange(5):
        case 0:
            value.number_value = rng.choice(FLOATS)
        case 1:
            value.string_value = text(rng)
        case 2:
            value.list_value.values.extend(
                struct_pb2.Value(number_value=rng.choice(FLOATS)) for _ in range(rng.choice((0, 1, MANY)))
            )
        case 3:
            value.null_value = struct_pb2.NULL_VALUE
        case _:
            value.SetInParent()  # a Value of no kind


def _mutate_map(entries: Any, field: Any, rng: random.Random) -> None:
    value = field.message_type.fields_by_name["value"]
    for index in range(rng.choice((0, 1, 65, MANY))):
        key = text(rng, long=False) if rng.random() < 0.05 else f"k{index}"
        if value.message_type is not None:
            entries[key].SetInParent()
        else:
            entries[key] = extreme(value, None, rng, long=False)


def _mutate_list(entries: Any, field: Any, known: Known, rng: random.Random, depth: int) -> None:
    for _ in range(rng.choice((1, 1, 2, 9, MANY if depth < 2 else 20))):
        if field.message_type is None:
            entries.append(extreme(field, known, rng, long=False))
        else:
            _mutate_message(entries.add(), known, rng, depth + 3)


def extreme(field: Any, known: Known | None, rng: random.Random, *, long: bool = True) -> Any:
    """A value that a field of this type can hold, at the edge of what it can hold."""
    if field.enum_type is not None:
        return rng.choice((-1, 1, 2, 99, (1 << 31) - 1, -(1 << 31), rng.choice(field.enum_type.values).number))
    match field.type:
        case FieldDescriptor.TYPE_DOUBLE | FieldDescriptor.TYPE_FLOAT:
            return rng.choice(FLOATS)
        case FieldDescriptor.TYPE_BOOL:
            return rng.random() < 0.5
        case FieldDescriptor.TYPE_STRING:
            ids = [value for value in dataclasses.astuple(known) if isinstance(value, str)] if known else []
            return rng.choice(ids) if ids and rng.random() < 0.2 else text(rng, long=long)
        case FieldDescriptor.TYPE_BYTES:
            return rng.choice(BYTES)
    low, high = _RANGES[field.type]
    return rng.choice((low, high, high - 1, 0, 1, 2, 3, 7, 16, 1 << 20, high // 2 + 1))


def text(rng: random.Random, *, long: bool = True) -> str:
    if long and rng.random() < 0.01:
        return rng.choice("ab\u00e9") * LARGE
    if rng.random() < 0.2:
        return "".join(rng.choices(string.printable, k=rng.randrange(60)))
    return rng.choice(TEXTS)


# --- broken bytes -----------------------------------------------------------------------------------------------------


def damaged(data: bytes, rng: random.Random) -> tuple[str, bytes]:
    """How, and the bytes."""
    how = rng.choice(sorted(_DAMAGES))
    return how, _DAMAGES[how](data, rng)


def flipped(data: bytes, rng: random.Random) -> bytes:
    """A few bits of it changed."""
    result = bytearray(data)
    for _ in range(rng.choice((1, 2, 8)) if result else 0):
        result[rng.randrange(len(result))] ^= 1 << rng.randrange(8)
    return bytes(result)


def _unknown(data: bytes, rng: random.Random) -> bytes:
    """Fields that no version has: of every wire type, in large numbers."""
    fields = (b"\xf8\xff\xff\xff\x0f\x01", b"\xba\x3e\x03abc", b"\xb9\x3e" + bytes(8), b"\xbd\x3e" + bytes(4))
    return data + rng.choice(fields) * rng.choice((1, 2, 5000))


def _not_text(data: bytes, rng: random.Random) -> bytes:
    """The model's name, field 1 of most requests, and others as bytes that are not UTF-8."""
    return data + bytes((rng.choice((1, 2, 3, 7)) << 3 | 2, 2)) + rng.choice((b"\xff\xfe", b"\xc0\x80", b"\xed\xa0"))


def _nested(data: bytes, rng: random.Random) -> bytes:
    """Messages or groups in each other, deeper than any parser goes."""
    if rng.random() < 0.5:
        return data + b"\x2b" * 20_000
    inner = b""
    for _ in range(rng.choice((99, 101, 3000))):
        inner = bytes((rng.choice((1, 4, 5)) << 3 | 2,)) + _varint(len(inner)) + inner
    return data + inner


def _varint(value: int) -> bytes:
    result = bytearray()
    while value > 0x7F:
        result.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*result, value))


_DAMAGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "bits": flipped,
    "cut": lambda data, rng: data[: rng.randrange(len(data) + 1)],
    "joined": lambda data, rng: data * rng.choice((2, 3, 40)),
    "noise": lambda data, rng: rng.randbytes(rng.choice((1, 10, 1000, 100_000))),
    "unknown fields": _unknown,
    "not text": _not_text,
    "nested": _nested,
    "length": lambda data, rng: data + b"\x0a" + rng.choice((b"\xff\xff\xff\xff\x0f", b"\x7f", b"\x80" * 11)),
    "zeros": lambda data, rng: data + bytes(rng.choice((1, 4096))),
}


def _stream(first: bytes, known: Known, rng: random.Random) -> tuple[bytes, ...]:
    """The messages of an upload: whole, out of order, too many, none at all."""
    half = len(known.picture) // 2
    parts: Sequence[bytes] = [
        artifact_pb2.UploadAssetRequest(data=part).SerializeToString()
        for part in (known.picture[:half], known.picture[half:])
    ]
    whole = (first, *parts)
    return rng.choice(
        (whole, whole, whole, (), (first,), (first, first, *parts), tuple(reversed(whole)), (*whole, parts[0]), parts)
    )


def odd_metadata(rng: random.Random) -> tuple[tuple[str, str | bytes], ...]:
    """What the library lets a client send; `fuzz_sockets` sends the rest."""
    return tuple(_entries(rng))


def _entries(rng: random.Random) -> Iterator[tuple[str, str | bytes]]:
    match rng.randrange(5):
        case 0:
            for _ in range(rng.choice((1, 2, 3))):
                yield "authorization", rng.choice(("", "Bearer", "Bearer x", "Basic eDp5", "Bearer " + "x" * 2000))
        case 1:
            yield "x-noise-bin", rng.randbytes(rng.choice((0, 1, 3000)))
        case 2:
            for index in range(100):
                yield f"x-{index}", "v"
        case 3:
            yield "grpc-previous-rpc-attempts", rng.choice(("-1", "x", "4294967296"))
        case _:
            yield "x-large", "v" * rng.choice((1000, 7000, 20_000))
