"""The decoder process: the same media as in this process, and what becomes of files that end it."""

import dataclasses
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from omni_grpc.config import EngineConfig
from omni_grpc.media_in import inputs as media_inputs
from omni_grpc.media_in.decode_process import memory_limit
from omni_grpc.media_in.decoder import Decoder
from omni_grpc.media_in.inputs import InputFile, decode
from omni_grpc.types.errors import InternalError, InvalidArgument, ResourceExhausted
from omni_grpc.types.shared_inputs import free_blocks, media_of, read_inputs
from tests.media_in.files import film, picture, recording, saved, tone

BLOCKS = Path("/dev/shm")
LIMITS = EngineConfig.from_settings(model="toy").limits
FILES = [
    InputFile(path="images[0]", name="images", data=saved(picture(), "PNG")),
    InputFile(path="images[1]", name="images", data=saved(picture(9, 5), "JPEG"), mime_type="image/jpeg"),
    InputFile(path="mask", name="mask", data=saved(picture(), "PNG")),
    InputFile(path="source_video", name="source_video", data=film(sound=True)),
    InputFile(path="audio", name="audio", data=recording(tone())),
]


class Room:
    """Takes up to `most` bytes."""

    def __init__(self, most=1 << 30):
        self.most = most
        self.sizes = {}

    def reserve(self, blocks):
        if sum(block.size for block in blocks) > self.most:
            raise ResourceExhausted("full", reason="INPUTS_FULL")
        self.sizes |= {block.name: block.size for block in blocks}

    def free_blocks(self, names):
        free_blocks(names)
        for name in names:
            del self.sizes[name]


@pytest.fixture
def decoder():
    made = Decoder(LIMITS)
    yield made
    made.kill()
    assert list(BLOCKS.glob(f"{made._prefix}*")) == []


@pytest.fixture(scope="module")
def slow():
    """Takes over a second to decode, on any machine of today."""
    data = saved(PIL.Image.new("RGB", (8000, 8000)), "PNG", compress_level=1)
    return [InputFile(path=f"images[{i}]", name="images", data=data) for i in range(4)]


def pid(decoder):
    return decoder._process._process.pid


def test_media_are_the_same_as_in_this_process(decoder):
    room = Room()
    expected, expected_warnings = decode(FILES, LIMITS)
    for _ in range(2):
        found, warnings = decoder.decode(FILES, room)
        assert all(medium.block and not medium.data for medium in media_of(found))
        held = zip(media_of(found), media_of(expected), strict=True)
        assert {medium.block: len(plain.data) for medium, plain in held} == room.sizes
        # twice, as for a job that is prepared again after its worker has died
        assert read_inputs(found) == read_inputs(found) == expected
        assert warnings == expected_warnings
        room.free_blocks([medium.block for medium in media_of(found)])
        with pytest.raises(FileNotFoundError):
            read_inputs(found)


def test_refusals_come_through_with_every_field(decoder):
    files = [FILES[0], dataclasses.replace(FILES[1], data=b"text"), dataclasses.replace(FILES[2], data=b"")]
    with pytest.raises(InvalidArgument) as caught:
        decoder.decode(files, Room())
    assert [violation.field for violation in caught.value.violations] == ["images[1]", "mask"]
    first = pid(decoder)
    with pytest.raises(ResourceExhausted):
        decoder.decode(FILES, Room(most=10))
    found, _ = decoder.decode(FILES[:1], Room())
    assert pid(decoder) == first, "no refusal costs a process"
    free_blocks(medium.block for medium in media_of(found))


def test_the_process_has_limits(decoder):
    decoder.decode([], Room())
    limits = Path(f"/proc/{pid(decoder)}/limits").read_text().splitlines()
    (found,) = (int(line.split()[3]) for line in limits if line.startswith("Max data size"))
    assert memory_limit(LIMITS) <= found < memory_limit(LIMITS) + (1 << 30)
    assert Path(f"/proc/{pid(decoder)}/oom_score_adj").read_text() == "1000\n"


def test_what_needs_more_memory_than_that_is_refused_by_its_field(monkeypatch):
    """No file within the limits does so, but for a defect of a library."""

    def hungry(*arguments, **options):
        return np.ones(1 << 59)

    monkeypatch.setattr(media_inputs, "DECODE", {**media_inputs.DECODE, "mask": hungry})
    with pytest.raises(InvalidArgument, match="mask: needs more memory than a decoder may take") as caught:
        decode(FILES[:3], LIMITS)
    assert [violation.field for violation in caught.value.violations] == ["mask"]
    assert caught.value.reason == "INPUT_TOO_LARGE"


def test_a_signal_to_the_whole_group_does_not_reach_the_process(decoder):
    decoder.decode([], Room())
    first = pid(decoder)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(first, number)
    decoder.decode([], Room())
    assert pid(decoder) == first


@pytest.mark.parametrize("how", [signal.SIGSEGV, signal.SIGKILL])
def test_a_file_that_ends_the_process_is_refused_and_the_next_one_is_decoded(decoder, how, slow):
    decoder.decode([], Room())
    first, room = pid(decoder), Room()
    threading.Timer(0.3, os.kill, (first, how)).start()
    with pytest.raises(InvalidArgument, match=rf"images\[3\]: made its decoder end by signal {how.name}") as caught:
        decoder.decode(slow, room)
    assert caught.value.reason == "INPUT_UNREADABLE"
    assert [violation.field for violation in caught.value.violations] == [file.path for file in slow]
    found, _ = decoder.decode(FILES, room)
    assert pid(decoder) != first
    room.free_blocks([medium.block for medium in media_of(found)])
    assert room.sizes == {}


def test_a_process_that_ends_after_room_was_made_gives_it_back(decoder):
    class Deadly(Room):
        def reserve(self, blocks):
            super().reserve(blocks)
            os.kill(pid(decoder), signal.SIGKILL)
            time.sleep(0.1)

    room = Deadly()
    with pytest.raises(InvalidArgument, match="by signal SIGKILL"):
        decoder.decode(FILES, room)
    assert room.sizes == {}


def test_a_file_that_takes_too_long_is_refused(slow):
    decoder = Decoder(dataclasses.replace(LIMITS, input_timeout=0.3))
    with pytest.raises(InvalidArgument, match=r"took more than 0\.3 s to decode.*--input-timeout") as caught:
        decoder.decode(slow, Room())
    assert caught.value.reason == "INPUT_TOO_LARGE"
    assert not decoder._process.alive


def test_decoding_can_be_stopped_from_another_thread(decoder, slow):
    decoder.decode([], Room())
    threading.Timer(0.3, decoder.kill).start()
    with pytest.raises(InvalidArgument, match="by signal SIGKILL"):
        decoder.decode(slow, Room())


def test_a_process_that_is_still_starting_can_be_stopped(decoder):
    threading.Timer(0.05, decoder.kill).start()
    with pytest.raises(InternalError, match="did not start: it ended by signal SIGKILL"):
        decoder.decode(FILES, Room())
    found, _ = decoder.decode([], Room())
    assert found.given == ()
