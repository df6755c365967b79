"""Adapters that are loaded and unloaded while a worker runs, on a real worker with a tiny model."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from omni_grpc.features.lora import LoraLinear
from omni_grpc.features.lora import adapters as at_run_time
from omni_grpc.types.errors import Code
from omni_grpc.types.plan import (
    AdapterFailed,
    AdapterLoaded,
    AdapterUnloaded,
    Broken,
    LoadAdapter,
    Plan,
    Prepared,
    Sleep,
    SleepLevel,
    Slept,
    Stepped,
    UnloadAdapter,
    Wake,
    Woken,
)
from tests.worker.adapted import LAYERS, Served, served, use, write

ON = {"lora_device_cache": 1 << 30}
"""What turns the feature on without any adapter at start."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: write(folder / f"{name}.safetensors", seed) for seed, name in enumerate("abcd")}


@pytest.fixture(scope="module")
def made(tiny_qwen_image: Path, files: dict[str, Path]) -> dict[str, bytes]:
    """What comes of each adapter, loaded at start, and of none ("")."""
    with served(tiny_qwen_image, lora={name: str(path) for name, path in files.items()}) as it:
        found = {name: it.make(*use(name)) for name in files} | {"": it.make(), "ab": it.make(*use("a", "b"))}
    assert len(set(found.values())) == len(found)
    return found


@pytest.fixture(scope="module")
def size(tiny_qwen_image: Path, files: dict[str, Path]) -> int:
    """Bytes of one adapter in memory."""
    with served(tiny_qwen_image, lora={"a": str(files["a"])}) as it:
        return it.found.loras[0].nbytes


@pytest.fixture
def it(tiny_qwen_image: Path) -> Iterator[Served]:
    with served(tiny_qwen_image, **ON) as worker:
        yield worker


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Reading a file has begun, and it may go on."""
    begun, go_on = threading.Event(), threading.Event()
    read = at_run_time.read_files

    def slowly(*arguments: Any) -> Any:
        begun.set()
        assert go_on.wait(60)
        return read(*arguments)

    monkeypatch.setattr(at_run_time, "read_files", slowly)
    yield begun, go_on
    go_on.set()


def layers(it: Served) -> list[str]:
    return [name for name, part in it.worker._runner._pipeline.named_modules() if isinstance(part, LoraLinear)]


def test_what_is_loaded_at_run_time_is_what_is_loaded_at_start_bit_for_bit(
    it: Served, files: dict[str, Path], made: dict[str, bytes]
) -> None:
    """And what runs without it is as it was, with modulation that requests share."""
    assert it.found.loras == ()
    assert layers(it) == []
    assert it.make() == made[""]
    loaded = it.load("a", files["a"], sha256=hashlib.sha256(files["a"].read_bytes()).hexdigest(), format="peft")
    adapter = loaded.adapter
    assert (adapter.id, adapter.uid, adapter.rank, adapter.applied) == ("a", "a@1", 4, {"transformer": 2 * len(LAYERS)})
    assert 0 < loaded.elapsed < 60
    assert len(layers(it)) == len(LAYERS)
    assert it.make(*use("a")) == made["a"]
    assert it.make() == made[""]
    it.load("b", files["b"])
    assert it.make(*use("a", "b")) == made["ab"]
    assert [one.key for one in it.adapters.found] == ["a@1", "b@1"]
    for uid in ("a@1", "b@1"):
        it.worker.order(UnloadAdapter(uid=uid))
        assert it.next(AdapterUnloaded).uid == uid
    assert it.adapters.found == ()
    assert (it.adapters.device.used, it.adapters.host.used, layers(it)) == (0, 0, [])
    assert it.make() == made[""]


def test_steps_go_on_while_a_file_is_read(
    it: Served, files: dict[str, Path], made: dict[str, bytes], held: tuple[threading.Event, threading.Event]
) -> None:
    begun, go_on = held
    request = it.request(steps=2)
    it.admit(request)
    it.worker.order(LoadAdapter(id="a", uid="a@1", path=str(files["a"])))
    assert begun.wait(60)
    steps = [it.step(request).progress[0].step for _ in range(2)]
    assert (steps, it.waiting(AdapterLoaded)) == ([1, 2], [])
    assert it.decode(request) == made[""]
    assert it.make() == made[""], "a whole request"
    go_on.set()
    it.found = it.found.with_adapter(it.next(AdapterLoaded).adapter)
    assert it.make(*use("a")) == made["a"]


def test_what_was_used_longest_ago_leaves_the_device(
    tiny_qwen_image: Path, files: dict[str, Path], made: dict[str, bytes], size: int
) -> None:
    with served(tiny_qwen_image, lora_device_cache=2 * size + size // 2) as it:
        for name in "abc":
            it.load(name, files[name])
        # a load takes room that is free, and sends nobody away
        assert it.adapters.device.keys == ("a@1", "b@1")
        assert it.adapters.host.used == 3 * size
        assert it.make(*use("a")) == made["a"]
        assert it.make(*use("c")) == made["c"]
        assert (it.adapters.device.keys, it.adapters.device.used) == (("a@1", "c@1"), 2 * size)
        assert it.make(*use("b")) == made["b"]
        assert it.adapters.device.keys == ("c@1", "b@1")
        assert it.make(*use("a", "b")) == made["ab"]
        assert it.make() == made[""]
        parts = {
            key for part in it.worker._runner._pipeline.modules() if isinstance(part, LoraLinear) for key in part.parts
        }
        assert parts == {"a@1", "b@1"}, "no layer keeps what has left"
        told = {one.name: (one.used_bytes, one.limit_bytes, one.evictions) for one in it.worker.vitals().adapters}
        assert told["host"] == (3 * size, 8 << 30, 0)
        # c for b, b for a, a for c
        assert told["device"] == (2 * size, 2 * size + size // 2, 3)
        assert told["merged"] == (0, 1 << 30, 0)


def test_what_is_in_use_or_pinned_stays_and_others_are_refused(
    tiny_qwen_image: Path, files: dict[str, Path], made: dict[str, bytes], size: int
) -> None:
    with served(tiny_qwen_image, lora_device_cache=size) as it:
        for name in "ab":
            it.load(name, files[name])
        running = it.request(*use("a"))
        it.admit(running)
        it.step(running)
        other = it.request(*use("b"))
        it.worker.submit(Plan(admit=(other,)))
        broken = it.next(Broken)
        failure = broken.failure
        assert (broken.id, broken.phase) == (other.id, "prepare")
        assert (failure.code, failure.reason) == (Code.RESOURCE_EXHAUSTED, "LORA_CACHE_FULL")
        assert "--lora-device-cache" in failure.message
        assert failure.retryable
        it.step(running)
        assert it.decode(running) == made["a"]
        assert it.make(*use("b")) == made["b"]
        # of a request that was dropped, nothing stays in use
        dropped = it.request(*use("b"))
        it.admit(dropped)
        it.worker.submit(Plan(drop=(dropped.id,)))
        it.load("c", files["c"], pinned=True)
        assert it.adapters.device.keys == ("c@1",)
        it.worker.submit(Plan(admit=(it.request(*use("a")),)))
        assert it.next(Broken).failure.reason == "LORA_CACHE_FULL"
        it.worker.order(LoadAdapter(id="d", uid="d@1", path=str(files["d"]), pinned=True))
        assert it.next(AdapterFailed).failure.reason == "LORA_CACHE_FULL"
        assert it.make(*use("c")) == made["c"]
        assert it.adapters.host.keys == ("a@1", "b@1", "c@1")


def test_one_that_the_caches_can_never_hold_is_refused(
    tiny_qwen_image: Path, files: dict[str, Path], size: int
) -> None:
    with served(tiny_qwen_image, lora_device_cache=size - 1) as it:
        it.worker.order(LoadAdapter(id="a", uid="a@1", path=str(files["a"])))
        failure = it.next(AdapterFailed).failure
        assert (failure.reason, failure.retryable) == ("LORA_CACHE_FULL", False)
        assert "--lora-device-cache" in failure.message
        assert layers(it) == []


def test_what_the_host_dropped_is_read_again_if_it_is_the_same_file(
    tiny_qwen_image: Path, files: dict[str, Path], made: dict[str, bytes], size: int, tmp_path: Path
) -> None:
    mine = {name: Path(shutil.copy(files[name], tmp_path)) for name in "abc"}
    with served(tiny_qwen_image, lora_host_cache=2 * size, lora_device_cache=size) as it:
        for name in "abc":
            it.load(name, mine[name])
        assert it.adapters.host.keys == ("b@1", "c@1")
        assert it.make(*use("b")) == made["b"]
        assert it.make(*use("a")) == made["a"], "read again"
        assert it.adapters.host.keys == ("c@1", "a@1")
        shutil.copy(files["d"], mine["b"])
        it.worker.submit(Plan(admit=(it.request(*use("b")),)))
        failure = it.next(Broken).failure
        assert (failure.code, failure.reason) == (Code.FAILED_PRECONDITION, "LORA_NOT_LOADED")
        assert "it is another file now" in failure.message
        assert it.make(*use("c")) == made["c"]


def test_another_file_under_the_same_id_is_another_adapter(
    it: Served, files: dict[str, Path], made: dict[str, bytes]
) -> None:
    it.load("style", files["a"], "style@1")
    before = it.request(*use("style"))
    it.admit(before)
    it.step(before)
    it.load("style", files["b"], "style@2")
    it.worker.order(UnloadAdapter(uid="style@1"))
    after = it.request(*use("style"))
    assert [lora.uid for request in (before, after) for lora in request.loras] == ["style@1", "style@2"]
    it.admit(after)
    it.step(before, after)
    assert it.waiting(AdapterUnloaded) == [], "a request has it still"
    # no other one is admitted with it
    late = it.request(*use("style"), name="late")
    it.worker.submit(Plan(admit=(_with_uid(late, "style@1"),)))
    failure = it.next(Broken).failure
    assert (failure.reason, "is being unloaded" in failure.message) == ("LORA_NOT_LOADED", True)
    assert it.decode(before) == made["a"]
    assert it.next(AdapterUnloaded).uid == "style@1"
    it.step(after)
    assert it.decode(after) == made["b"]
    assert it.make(*use("style")) == made["b"]
    assert it.adapters.host.keys == ("style@2",)


def _with_uid(request: Any, uid: str) -> Any:

    return dataclasses.replace(request, loras=tuple(dataclasses.replace(lora, uid=uid) for lora in request.loras))


@pytest.mark.parametrize("level", SleepLevel)
def test_adapters_are_there_after_a_sleep(
    tiny_qwen_image: Path, files: dict[str, Path], made: dict[str, bytes], level: SleepLevel
) -> None:
    """Those that were loaded by order, and of those of the settings what was not unloaded."""
    with served(tiny_qwen_image, lora={"a": str(files["a"]), "b": str(files["b"])}) as it:
        it.load("c", files["c"], pinned=True)
        it.worker.order(UnloadAdapter(uid="b"))
        assert it.next(AdapterUnloaded).uid == "b"
        it.worker.order(Sleep(level=level))
        it.next(Slept)
        # on a CPU, what is kept stays where it is
        assert (it.worker._adapting._adapters is None) == (level is SleepLevel.DROP_WEIGHTS)
        it.worker.order(Wake())
        woken = it.next(Woken)
        assert it.waiting(AdapterLoaded) == [], "nothing new"
        if woken.ready is not None:
            assert [adapter.key for adapter in woken.ready.found.loras] == ["a", "c@1"]
        assert "c@1" in it.adapters.device, "what is pinned comes at once"
        it.found = it.found.without_adapter("b")
        assert it.make(*use("c")) == made["c"]
        assert it.make(*use("a")) == made["a"]
        assert it.make() == made[""]


def test_a_load_that_a_sleep_interrupts_is_told_of_after_it(
    it: Served, files: dict[str, Path], made: dict[str, bytes], held: tuple[threading.Event, threading.Event]
) -> None:
    begun, go_on = held
    it.worker.order(LoadAdapter(id="a", uid="a@1", path=str(files["a"])))
    assert begun.wait(60)
    it.worker.order(Sleep(level=SleepLevel.DROP_WEIGHTS))
    it.next(Slept)
    go_on.set()
    it.worker.order(Wake())
    loaded = it.next(AdapterLoaded)
    ready = it.next(Woken).ready
    assert ready is not None
    assert [adapter.key for adapter in ready.found.loras] == [loaded.adapter.key] == ["a@1"]
    it.found = ready.found
    assert it.make(*use("a")) == made["a"]
    assert it.waiting(AdapterLoaded) == []


def test_a_file_that_is_gone_after_a_sleep_is_told_and_the_model_wakes(
    it: Served, files: dict[str, Path], made: dict[str, bytes], tmp_path: Path
) -> None:
    mine = Path(shutil.copy(files["a"], tmp_path))
    it.load("a", mine)
    mine.unlink()
    it.worker.order(Sleep(level=SleepLevel.DROP_WEIGHTS))
    it.next(Slept)
    it.worker.order(Wake())
    failed, woken = it.next(AdapterFailed), it.next(Woken)
    assert (failed.uid, failed.failure.reason) == ("a@1", "BAD_LORA")
    assert woken.ready is not None
    assert woken.ready.found.loras == ()
    assert it.make() == made[""]


def test_one_that_is_unloaded_before_it_is_there_never_is(
    it: Served, files: dict[str, Path], made: dict[str, bytes], held: tuple[threading.Event, threading.Event]
) -> None:
    begun, go_on = held
    for name in "ab":
        it.worker.order(LoadAdapter(id=name, uid=f"{name}@1", path=str(files[name])))
    assert begun.wait(60)
    for uid in ("a@1", "b@1", "unknown"):
        it.worker.order(UnloadAdapter(uid=uid))
    assert it.next(AdapterUnloaded).uid == "unknown"
    go_on.set()
    failed = [it.next(AdapterFailed) for _ in range(2)]
    assert {one.uid: one.failure.reason for one in failed} == dict.fromkeys(("a@1", "b@1"), "LORA_UNLOADED")
    assert {it.next(AdapterUnloaded).uid for _ in range(2)} == {"a@1", "b@1"}
    assert it.make() == made[""]
    assert (it.adapters.host.used, layers(it), it.waiting(AdapterLoaded)) == (0, [], [])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"path": "nowhere.safetensors"}, "neither a file nor a folder"),
        ({"sha256": "0" * 64}, "it is another file now"),
        ({"format": "kohya"}, "has the layout peft, not kohya"),
    ],
)
def test_what_cannot_be_loaded_says_why(it: Served, files: dict[str, Path], more: dict[str, str], message: str) -> None:
    it.worker.order(LoadAdapter(**{"id": "a", "uid": "a@1", "path": str(files["a"])} | more))
    failed = it.next(AdapterFailed)
    assert (failed.uid, failed.failure.code, failed.failure.reason) == ("a@1", Code.INVALID_ARGUMENT, "BAD_LORA")
    assert message in failed.failure.message
    assert "--lora" not in failed.failure.message


def test_what_fits_no_layer_or_another_shape_is_refused(it: Served, tmp_path: Path) -> None:
    for layer, shape, message in (
        ("blocks.0.nothing", (4, 4), "no key of x.safetensors fits a layer"),
        ("img_in", (64, 64), "the model's is (128, 64)"),
    ):
        path = write(tmp_path / "x.safetensors", 0, layers={layer: shape})
        it.worker.order(LoadAdapter(id="x", uid=f"x@{layer}", path=str(path)))
        assert message in it.next(AdapterFailed).failure.message
    assert it.adapters.host.used == 0


def test_a_model_without_the_feature_says_how_to_turn_it_on(tiny_qwen_image: Path, files: dict[str, Path]) -> None:
    with served(tiny_qwen_image) as it:
        it.worker.order(LoadAdapter(id="a", uid="a@1", path=str(files["a"])))
        failure = it.next(AdapterFailed).failure
        assert (failure.code, failure.reason) == (Code.FAILED_PRECONDITION, "LORA_OFF")
        assert "--lora-device-cache" in failure.message


def test_files_say_which_adapter_they_were_made_with(it: Served, files: dict[str, Path]) -> None:
    """Also one that was not there when the model was loaded."""
    it.load("a", files["a"])
    found = it.worker._runner._delivery._found()
    assert [adapter.key for adapter in found.loras] == ["a@1"]


def test_a_request_waits_for_what_a_dropped_one_still_uses_in_a_step(
    tiny_qwen_image: Path,
    files: dict[str, Path],
    made: dict[str, bytes],
    size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would find no room otherwise, in the moment until the step ends."""
    begun, go_on = threading.Event(), threading.Event()
    with served(tiny_qwen_image, lora_device_cache=size) as it:
        for name in "ab":
            it.load(name, files[name])
        step = it.worker._runner.step

        def slowly(ids: Any) -> Any:
            begun.set()
            assert go_on.wait(60)
            return step(ids)

        monkeypatch.setattr(it.worker._runner, "step", slowly)
        first, second = it.request(*use("a")), it.request(*use("b"))
        it.admit(first)
        it.worker.submit(Plan(step=(first.id,)))
        assert begun.wait(60)
        it.worker.submit(Plan(drop=(first.id,), admit=(second,)))
        assert it.adapters.device.keys == ("a@1",), "the step reads it"
        go_on.set()
        it.next(Stepped)
        it.next(Prepared)
        for _ in range(second.steps):
            it.step(second)
        assert it.decode(second) == made["b"]
        assert it.waiting(Broken) == []
