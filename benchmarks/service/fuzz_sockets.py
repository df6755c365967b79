"""What no gRPC library sends: HTTP/2 frames by hand, and connections that stall, flood, or say nothing."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import random
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from .fuzz_messages import Known
from .server import Server

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST, SETTINGS, PING, GOAWAY, WINDOW, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
ENDED, WHOLE = 1, 4
SECONDS = 2.0
"""That an answer is waited for."""
CONNECTIONS = 1000
_STATUS = re.compile(rb"grpc-status(.)(\d{1,2})", re.DOTALL)
GENERATE = "/omni_grpc.v1.GenerationService/GenerateImage"
LIST = "/omni_grpc.v1.JobService/ListJobs"
UPLOAD = "/omni_grpc.v1.ArtifactService/UploadAsset"

TIMEOUTS = ("abc", "", "-1S", "1X", "99999999999999S", "1", "S", "0n", "9" * 300 + "H", "1.5S", "100m")


@dataclasses.dataclass(frozen=True)
class Talk:
    """A connection to a server and what is sent on it."""

    wire: socket.socket
    known: Known
    rng: random.Random

    def begin(self, settings: bytes = b"") -> None:
        self.wire.sendall(PREFACE + frame(SETTINGS, 0, 0, settings))

    def ask(self, path: str, body: bytes, headers: Sequence[tuple[bytes, bytes]] = (), *, flags: int = ENDED) -> None:
        """One call, on the first stream."""
        block = b"".join(
            literal(name, value)
            for name, value in (
                (b":method", b"POST"), (b":scheme", b"http"), (b":path", path.encode()), (b":authority", b"x"),
                (b"te", b"trailers"), (b"content-type", b"application/grpc"), *headers,
            )
        )  # fmt: skip
        self.wire.sendall(frame(HEADERS, WHOLE, 1, block) + frame(DATA, flags, 1, body))

    def answer(self) -> str:
        """The status of the call, or how the connection ended."""
        said, until = b"", time.monotonic() + SECONDS
        self.wire.settimeout(0.2)
        while time.monotonic() < until:
            try:
                if not (part := self.wire.recv(1 << 16)):
                    return "closed"
            except TimeoutError:
                continue
            except ConnectionError:
                return "reset"
            said += part
            if found := _STATUS.search(said):
                return f"grpc-status {found[2].decode()}"
            if b"\x00\x00\x04\x03\x00" in said:
                return "stream reset"
        return "no answer"


def frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return len(body).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + body


def literal(name: bytes, value: bytes) -> bytes:
    """A header that no table has."""
    return b"\0" + _length(name) + name + _length(value) + value


def _length(text: bytes) -> bytes:
    if len(text) < 127:
        return bytes((len(text),))
    rest, result = len(text) - 127, bytearray((127,))
    while rest > 127:
        result.append(rest & 127 | 128)
        rest >>= 7
    return bytes((*result, rest))


def message(data: bytes, *, flag: int = 0, size: int | None = None) -> bytes:
    return bytes((flag,)) + (len(data) if size is None else size).to_bytes(4, "big") + data


# --- scenes -----------------------------------------------------------------------------------------------------------


def _noise(talk: Talk) -> None:
    talk.wire.sendall(talk.rng.choice((b"", PREFACE)) + talk.rng.randbytes(talk.rng.choice((1, 100, 50_000))))


def _timeout(talk: Talk) -> None:
    talk.begin()
    talk.ask(LIST, message(b""), [(b"grpc-timeout", talk.rng.choice(TIMEOUTS).encode())])


def _compression(talk: Talk) -> None:
    talk.begin()
    name = talk.rng.choice((b"gzip", b"deflate", b"br", b"identity", b"", b"x" * 5000))
    body = talk.rng.choice(
        (b"", b"\x1f\x8b\x08", b"\x1f\x8b\x08\0\0\0\0\0\0\xff" + bytes(100), talk.rng.randbytes(300))
    )
    talk.ask(LIST, message(body, flag=talk.rng.choice((1, 1, 2, 255))), [(b"grpc-encoding", name)])


def _length_lies(talk: Talk) -> None:
    talk.begin()
    size = talk.rng.choice((1, 100, 1 << 22, (1 << 32) - 1, 1 << 31))
    talk.ask(talk.rng.choice((LIST, UPLOAD)), message(b"abc", size=size)[: talk.rng.choice((3, 5, 8))])


def _metadata(talk: Talk) -> None:
    talk.begin()
    odd: Sequence[tuple[bytes, bytes]] = talk.rng.choice(
        (
            [(b"authorization", b"\xff\xfe\0")],
            [(b"authorization", b"Bearer x")] * 2,
            [(b"x-many", b"v")] * 400,
            [(b"x-huge", b"v" * 15_000)],
            [(b"x-bin", b"***")],
            [(b"grpc-status-details-bin", b"!!")],
            [(b"X-Upper", b"v")],
            [(b":path", b"/again")],
            [(b"", b"v")],
            [(b"content-type", b"text/html")],
        )
    )
    talk.ask(LIST, message(b""), odd)


def _half_open(talk: Talk) -> None:
    """An upload that says what will come, and is silent, or is gone."""
    talk.begin()
    header = b"\x0a" + bytes((len(b"\x0a\x09image/png\x10\x64"),)) + b"\x0a\x09image/png\x10\x64"
    talk.ask(UPLOAD, message(header), flags=0)
    if talk.rng.random() < 0.5:
        talk.wire.sendall(frame(RST, 0, 1, (8).to_bytes(4, "big")))


def _slow_writer(talk: Talk) -> None:
    whole = PREFACE + frame(SETTINGS, 0, 0, b"")
    for at in range(len(whole)):
        talk.wire.sendall(whole[at : at + 1])
        time.sleep(0.002)
    talk.ask(LIST, message(b""))


def _slow_reader(talk: Talk) -> None:
    """No room for a single byte of the answer."""
    talk.begin(b"\0\x04" + (0).to_bytes(4, "big"))
    name = talk.known.model.encode()
    body = b"\x0a" + bytes((len(name),)) + name + b"\x12\x01a" + b"\x22\x02\x08\x01" + b"\x50\x20\x58\x20"
    talk.ask(GENERATE, message(body))


def _resets(talk: Talk) -> None:
    """Streams that are opened and reset at once."""
    talk.begin()
    block = literal(b":method", b"POST") + literal(b":scheme", b"http") + literal(b":path", LIST.encode())
    block += literal(b":authority", b"x") + literal(b"te", b"trailers") + literal(b"content-type", b"application/grpc")
    for stream in range(1, 400, 2):
        talk.wire.sendall(frame(HEADERS, WHOLE, stream, block) + frame(RST, 0, stream, (8).to_bytes(4, "big")))


def _floods(talk: Talk) -> None:
    talk.begin()
    one = talk.rng.choice(
        (
            frame(PING, 0, 0, bytes(8)),
            frame(SETTINGS, 0, 0, b""),
            frame(WINDOW, 0, 0, (1).to_bytes(4, "big")),
            frame(CONTINUATION, 0, 1, b"\0\x01a\x01b"),
            frame(DATA, 0, 7, bytes(100)),
            frame(GOAWAY, 0, 0, bytes(8)),
            frame(200, 255, 3, b"x"),
        )
    )
    talk.wire.sendall(one * 2000)


SCENES: Mapping[str, Callable[[Talk], None]] = {
    "noise": _noise,
    "grpc-timeout": _timeout,
    "compression": _compression,
    "length of a message": _length_lies,
    "metadata": _metadata,
    "half-open upload": _half_open,
    "slow writer": _slow_writer,
    "slow reader": _slow_reader,
    "resets": _resets,
    "floods": _floods,
}


def fuzz(server: Server, count: int, seed: int, known: Known) -> collections.Counter[tuple[str, str]]:
    """(scene, outcome) -> connections; `count` of each scene."""
    outcomes: collections.Counter[tuple[str, str]] = collections.Counter()
    for name, scene in SCENES.items():
        for index in range(count):
            with _connected(server) as wire:
                talk = Talk(wire, known, random.Random(f"{seed}:{name}:{index}"))
                try:
                    scene(talk)
                    silent = name in ("half-open upload", "slow reader")
                    outcomes[name, "left open, then closed" if silent else talk.answer()] += 1
                except ConnectionError:
                    outcomes[name, "reset"] += 1
    return outcomes


@contextlib.contextmanager
def crowd(server: Server, count: int = CONNECTIONS) -> Iterator[None]:
    """That many connections that say hello and no more, open during the block."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(_connected(server)).sendall(PREFACE + frame(SETTINGS, 0, 0, b""))
        yield


def _connected(server: Server) -> socket.socket:
    host, _, port = server.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10)
