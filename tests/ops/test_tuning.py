"""The choice among ways to compute an op: which times count, what is measured, and what is kept."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from omni_grpc.ops import tuning
from omni_grpc.ops.tuning import Choices, Shape

BOTH = frozenset({"wide", "narrow"})
CPU = torch.device("cpu")


def shape(size: int, *kind: str | int) -> Shape:
    return Shape("product", kind or ("fp8", 3072), size)


class Clock:
    """Gives each call the microseconds that it names, and counts."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, call: Callable[[], object], calls: int) -> float:
        self.calls += 1
        taken = call()
        assert isinstance(taken, int | float)
        return float(taken)


def ways(asked: Shape, device: torch.device) -> Mapping[str, Callable[[], object]]:
    """Narrow is the better one for few tokens; the third never runs."""

    def broken() -> object:
        raise RuntimeError("no such kernel")

    return {"wide": lambda: 100, "narrow": lambda: asked.size, "broken": broken}


def tuned(path: Path | None, *sizes: int) -> Choices:
    choices = Choices({}, path)
    with choices.recorded() as wanted:
        for size in sizes:
            assert choices.of(shape(size), BOTH, ways) is None
    assert choices.tune(wanted, CPU, 60, Clock()) == len(sizes)
    return choices


def test_the_fastest_of_what_is_allowed_counts() -> None:
    choices = tuned(None, 50, 200)
    assert choices.of(shape(50), BOTH) == "narrow"
    assert choices.of(shape(200), BOTH) == "wide"
    assert choices.of(shape(200), frozenset({"narrow"})) == "narrow"
    assert choices.of(shape(50), frozenset({"broken"})) is None


def test_a_size_goes_by_the_nearest_that_was_measured_and_by_none_far_away() -> None:
    choices = tuned(None, 50, 200)
    assert choices.of(shape(70), BOTH) == "narrow"
    assert choices.of(shape(150), BOTH) == "wide"
    # as far from both: the smaller one
    assert choices.of(shape(100), BOTH) == "narrow"
    assert choices.of(shape(401), BOTH) is None
    assert choices.of(shape(24), BOTH) is None
    assert choices.of(shape(0), BOTH) is None
    assert choices.of(shape(50, "int8", 3072), BOTH) is None


def test_only_what_is_asked_for_while_shapes_are_recorded_is_measured() -> None:
    choices = Choices({})
    choices.of(shape(10), BOTH, ways)
    with choices.recorded() as wanted:
        choices.of(shape(20), BOTH, ways)
        choices.of(shape(20), BOTH, ways)
        choices.of(shape(30), BOTH)
    choices.of(shape(40), BOTH, ways)
    assert wanted == {shape(20): ways}


def test_what_was_measured_is_not_measured_again_not_by_another_process_either(tmp_path: Path) -> None:
    path = tmp_path / "deeper" / "card.json"
    tuned(path, 50)
    again, clock = Choices({}, path), Clock()
    assert again.of(shape(50), BOTH) == "narrow"
    assert again.tune({shape(50): ways}, CPU, 60, clock) == 0
    assert clock.calls == 0
    # two processes that know nothing of each other: the file has what both found
    other = Choices({}, tmp_path / "none.json")
    other._path = path
    assert other.tune({shape(200): ways}, CPU, 60, Clock()) == 1
    assert Choices({}, path).of(shape(200), BOTH) == "wide"
    assert json.loads(path.read_text())["product fp8 3072"] == {
        "50": {"narrow": 50.0, "wide": 100.0},
        "200": {"narrow": 200.0, "wide": 100.0},
    }
    assert os.listdir(path.parent) == ["card.json"]


def test_shipped_times_serve_until_this_machine_has_its_own() -> None:
    choices = Choices({"product fp8 3072": {50: {"wide": 1.0, "narrow": 2.0}}})
    assert choices.of(shape(50), BOTH) == "wide"
    assert choices.tune({shape(50): ways}, CPU, 60, Clock()) == 1
    assert choices.of(shape(50), BOTH) == "narrow"


def test_measuring_ends_with_its_time() -> None:
    assert Choices({}).tune({shape(50): ways}, CPU, 0, Clock()) == 0


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"a": 1}', '{"a": {"b": {"c": 1}}}', '{"a": {"1": {"c": "fast"}}}', '{"a": {"1": {"c": 0}}}'],
)
def test_a_file_that_is_none_is_named_and_written_anew(
    content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "card.json"
    path.write_text(content)
    with caplog.at_level(logging.WARNING):
        choices = tuned(path, 50)
    assert f"{path} cannot be used, so its shapes are measured again" in caplog.text
    assert choices.of(shape(50), BOTH) == "narrow"
    caplog.clear()
    assert Choices({}, path).of(shape(50), BOTH) == "narrow"
    assert not caplog.records


def test_a_folder_that_cannot_be_written_costs_the_file_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tmp_path.joinpath("taken").write_text("")
    choices = tuned(tmp_path / "taken" / "card.json", 50)
    assert choices.of(shape(50), BOTH) == "narrow"
    assert "is not written, so the next start measures again" in caplog.text


def test_files_are_named_by_card_and_versions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    monkeypatch.setattr(tuning, "__version__", "0.1.0")
    path = tuning.kept_at("NVIDIA H100 80GB HBM3")
    assert path == tmp_path / "omni_grpc/tuning/nvidia-h100-80gb-hbm3_torch-2-11-0-cu130_0-1-0.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert tuning.kept_at("any").parent == Path.home() / ".cache/omni_grpc/tuning"
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 54321)  # a user that the system has no name for
    assert tuning.kept_at("any").parent == Path(tempfile.gettempdir()) / "omni_grpc-54321/omni_grpc/tuning"


def test_families_of_ops_have_files_of_their_own(tmp_path: Path) -> None:
    for name, op in (("a-card", "a"), ("a-card_b", "b"), ("a-card-nvl", "c")):
        (tmp_path / f"{name}.json").write_text(json.dumps({f"{op} kind": {"1": {"way": 1.0}}}))
    assert tuning.shipped("A card", tmp_path).keys() == {"a kind", "b kind"}


def test_what_wins_somewhere_is_found_by_how_its_kind_begins() -> None:
    known = Choices({"op f8 3": {1: {"x": 1.0, "y": 2.0}, 9: {"x": 2.0, "y": 1.0}}, "op f8 30": {1: {"z": 1.0}}})
    assert known.winners("op", ("f8", 3), frozenset("xyz")) == {"x", "y"}
    assert known.winners("op", ("f8",), frozenset("xz")) == {"x", "z"}
    assert known.winners("op", ("int8",), frozenset("xz")) == set()


def test_what_comes_with_the_package_can_be_read() -> None:
    for path in tuning.SHIPPED.glob("*.json"):
        assert all(part == tuning.slug(part) for part in path.stem.split("_", 1))
        assert tuning._parsed(json.loads(path.read_text())), path
    assert tuning.shipped("no such card") == {}


def test_the_times_of_another_process_take_the_place_of_its_own() -> None:
    shape, kernels = Shape("gemm", ("bf16",), 64), frozenset({"a", "b"})
    mine, theirs = (Choices({shape.family: {64: {"a": 1.0, "b": 2.0}}}) for _ in range(2))
    mine._take({shape.family: {64: {"a": 1.0, "b": 0.5}}})
    theirs._take({shape.family: {64: {"a": 0.1, "b": 0.5}}})
    assert (mine.of(shape, kernels), theirs.of(shape, kernels)) == ("b", "a")
    mine.adopt(theirs.own)
    assert mine.of(shape, kernels) == "a"
    mine.adopt({})
    assert mine.of(shape, kernels) == "a", "what comes with the package stays"
