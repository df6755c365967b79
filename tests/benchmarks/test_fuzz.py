"""A sample of bad input of every kind: a fixed seed, and one of its own for each run, which a failure prints."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from benchmarks.service import fuzz, fuzz_files, fuzz_media, fuzz_messages, fuzz_sockets, fuzz_wire
from benchmarks.service.server import served

pytestmark = pytest.mark.service

SEEDS = (1, fuzz.fresh_seed())


def test_requests_and_connections(tiny_qwen_image: Path) -> None:
    tally = fuzz_wire.Tally()
    with served(tiny_qwen_image, *fuzz.FLAGS) as server:
        for seed in SEEDS:
            asyncio.run(fuzz_wire.fuzz(server, 150, seed, tally))
        outcomes = fuzz.connections(server, fuzz.Numbers(connections=100, scenes=1, seed=SEEDS[1]), tally)
        assert not tally.problems, f"seeds {SEEDS}: {tally.problems}"
        assert fuzz.tracebacks(server.logged()) == [], f"seeds {SEEDS}"
    assert sum(tally.kinds.values()) == 300
    assert {scene for scene, _ in outcomes} == {*fuzz_sockets.SCENES, "open at once"}


def test_the_table_has_a_row_for_each_kind(tiny_qwen_image: Path) -> None:
    result = fuzz.measure({"image": (tiny_qwen_image, 1.0)}, fuzz.Numbers(count=40, what=("media",)))
    assert sum(sum(answers.values()) for answers in result.figures["media"].values()) == 40
    assert [row[1] for row in result.rows] == sorted(result.figures["media"])


def test_tracebacks_of_the_log_are_found() -> None:
    log = "INFO a\nTraceback (most recent call last):\n  File x\nValueError: y\nINFO b\n"
    assert fuzz.tracebacks(log) == ["ValueError: y"]
    assert fuzz.tracebacks("ERROR grpc._cython.cygrpc: Invalid encoding on b'x'\n" + log[7:]) == []


@pytest.mark.parametrize("seed", SEEDS, ids=["fixed", "random"])
def test_media(seed: int) -> None:
    answers, problems = fuzz_media.fuzz(200, seed)
    assert not problems, f"seed {seed}: {problems}"
    outcomes = {outcome for _, outcome in answers}
    assert {"OK", "INVALID_ARGUMENT INPUT_UNREADABLE", "INVALID_ARGUMENT INPUT_TOO_LARGE"} <= outcomes


def test_files(tiny_qwen_image: Path) -> None:
    answers, problems = fuzz_files.fuzz(tiny_qwen_image, 20, *SEEDS)
    assert not problems, f"seeds {SEEDS}: {problems}"
    assert any(outcome == "INVALID_ARGUMENT BAD_LORA" for _, outcome in answers)


def test_a_case_is_the_same_in_every_run() -> None:
    known = fuzz_messages.Known(model="m", picture=bytes(10))
    for index in range(50):
        first, second = (fuzz_messages.case(3, index, known) for _ in range(2))
        assert (first.path, first.how, len(first.payloads)) == (second.path, second.how, len(second.payloads))


def test_no_case_stops_what_the_others_ask_for() -> None:
    known = fuzz_messages.Known(model="m", picture=bytes(10))
    asked = set()
    for index in range(3000):
        case = fuzz_messages.case(0, index, known)
        if case.method.name not in fuzz_messages.STOPPING:
            continue
        message = GetMessageClass(case.method.input_type)()
        try:
            message.ParseFromString(case.payloads[0])
        except DecodeError:
            continue
        asked.add(case.method.name)
        assert message.model == "nowhere"
        assert case.method.name != "Drain" or message.replica == 99
    assert asked == set(fuzz_messages.STOPPING)


def test_every_rpc_is_asked() -> None:
    known = fuzz_messages.Known(model="m", picture=bytes(10))
    asked = {fuzz_messages.case(0, index, known).path for index in range(2000)}
    assert len(asked) == len(fuzz_messages.methods()) == 30
