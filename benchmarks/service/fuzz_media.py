"""Damaged pictures, videos and sounds, through the process that decodes those of requests."""

from __future__ import annotations

import collections
import dataclasses
import io
import random
import time
import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import PIL.Image

from omni_grpc.config import LimitsConfig
from omni_grpc.media_in.decoder import Decoder
from omni_grpc.media_in.inputs import InputFile
from omni_grpc.types import shared_memory as shared
from omni_grpc.types.errors import OmniError
from omni_grpc.types.media import AudioFormat, VideoFormat
from omni_grpc.types.plan import SharedBytes
from omni_grpc.types.shared_inputs import media_of

from .fuzz_messages import flipped

LIMITS = LimitsConfig(
    max_input_bytes=4 << 20,
    max_input_pixels=1 << 20,
    max_input_frames=64,
    max_input_video_pixels=1 << 22,
    max_input_seconds=10.0,
    input_timeout=5.0,
)
PICTURES = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
Answers = collections.Counter[tuple[str, str]]


@dataclasses.dataclass
class Room:
    """Counts the blocks that are put and not freed."""

    held: set[str] = dataclasses.field(default_factory=set)

    def reserve(self, blocks: Sequence[SharedBytes]) -> None:
        self.held |= {block.name for block in blocks}

    def free_blocks(self, names: Sequence[str]) -> None:
        for name in names:
            shared.discard(name)
        self.held -= set(names)


def fuzz(count: int, seed: int) -> tuple[Answers, list[str]]:
    """(Kind of file, outcome) -> files, and what should not have been."""
    answers: Answers = collections.Counter()
    problems: list[str] = []
    sound, decoder, room = samples(), Decoder(LIMITS), Room()
    try:
        for index in range(count):
            rng = random.Random(f"{seed}:{index}")
            kind = rng.choice(sorted(sound))
            name, data = sound[kind]
            file = InputFile(path="x", name=name, data=damaged(data, rng) if rng.random() < 0.97 else data)
            began = time.monotonic()
            outcome = _outcome(decoder, file, room)
            if (took := time.monotonic() - began) > LIMITS.input_timeout + 60:
                problems.append(f"file {seed}:{index} ({kind}) took {took:.1f} s")
            answers[kind, outcome.partition(":")[0]] += 1
            if not outcome.startswith(("OK", "INVALID_ARGUMENT INPUT", "RESOURCE_EXHAUSTED")):
                problems.append(f"file {seed}:{index} ({kind}): {outcome[:300]}")
    finally:
        decoder.kill()
    if room.held:
        problems.append(f"{len(room.held)} blocks are left")
    return answers, problems


def _outcome(decoder: Decoder, file: InputFile, room: Room) -> str:
    try:
        inputs, _ = decoder.decode([file], room)
    except OmniError as error:
        ended = ", its decoder ended" if "made its decoder end" in str(error) else ""
        return f"{error.failure.code} {error.failure.reason}{ended}: {error}"
    except Exception as error:  # noqa: BLE001 - what is looked for
        return f"INTERNAL {type(error).__name__}: {error}"
    room.free_blocks([medium.block for medium in media_of(inputs)])
    return "OK"


def samples() -> Mapping[str, tuple[str, bytes]]:
    """Kind -> the input that takes it, and a small file of it."""
    from omni_grpc.worker import media

    noise = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    found = {kind: ("images", _saved(noise, kind)) for kind in PICTURES}
    found["mask"] = ("mask", _saved(noise[..., 0], "PNG"))
    tone = np.sin(np.arange(4000) / 20, dtype=np.float32)[None]
    for video in VideoFormat:
        found[str(video)] = ("source_video", media.encode_video(np.stack([noise] * 3), 8, video, (tone, 16000)))
    for sound in AudioFormat:
        found[str(sound)] = ("audio", media.encode_audio(tone, 16000, sound))
    found["bomb"] = ("images", _bomb())
    return found


def _saved(pixels: np.ndarray, kind: str) -> bytes:
    buffer = io.BytesIO()
    PIL.Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


def _bomb() -> bytes:
    """A PNG of 60000 x 60000 pixels in a few kilobytes."""
    side = (60_000).to_bytes(4, "big")
    chunks = ((b"IHDR", side + side + b"\x08\0\0\0\0"), (b"IDAT", zlib.compress(bytes(10_000_000))), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big") for kind, data in chunks
    )


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Bits flipped, words at their extremes (in both orders of bytes), cut off, parts doubled or left out."""
    head = rng.choice((32, 128, 1024, len(data)))
    at = rng.randrange(min(head, len(data)))
    match rng.randrange(6):
        case 0 | 1:
            return flipped(data[:head], rng) + data[head:]
        case 2:
            return data[:at] if rng.random() < 0.5 else data[: rng.randrange(len(data))]
        case 3:
            size = rng.choice((1, 2, 4, 8))
            value = rng.choice((0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 24, 1 << 63))
            word = (value & ((1 << 8 * size) - 1)).to_bytes(size, rng.choice(("big", "little")))
            return data[:at] + word + data[at + size :]
        case 4:
            return data[:at] + rng.randbytes(rng.choice((1, 50, 5000))) + data[at + rng.choice((0, 1, 50)) :]
        case _:
            return data[:at] + data[at // 2 :]
