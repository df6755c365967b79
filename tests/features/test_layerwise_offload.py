"""Where the weights of an offloaded stack are, and when, on a made-up stack."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from omni_grpc.features.layerwise_offload import Offload, Offloaded, _evenly_spaced
from omni_grpc.nn.linear import Linear
from omni_grpc.nn.rows import LayoutCache, Row, Rows
from omni_grpc.nn.stack import Stack
from omni_grpc.ops import host
from tests.features.offloaded import BLOCKS, LAYER_BYTES, WIDTH, Two, held, pair, run


def middleware(stack: Stack) -> Offload:
    found = stack._run.func.__self__  # type: ignore[attr-defined]
    assert isinstance(found, Offload)
    return found


@torch.inference_mode()
def test_a_stack_gives_the_same_bits_with_two_blocks_on_the_device() -> None:
    plain, stack, blocks = pair()
    offload, seen = middleware(stack), []

    def look(block: Two, *_: object) -> None:
        seen.append((blocks.index(block), held(block), held(stack), set(offload.slots)))

    for block in blocks:
        block.register_forward_hook(look)
    for _ in range(2):
        assert torch.equal(run(stack), run(plain))
    here = 2 * LAYER_BYTES
    assert seen == [(n, here, here, {n, (n + 1) % BLOCKS}) for n in range(BLOCKS)] * 2
    assert held(stack) == 0
    assert [memory.nbytes for memory in offload._memory] == [2 * LAYER_BYTES] * 2
    masters = [layer.host for layer in stack.modules() if isinstance(layer, Offloaded)]
    assert sum(x.numel() * x.element_size() for host in masters for x in host.values()) == 4 * BLOCKS * LAYER_BYTES


@torch.inference_mode()
def test_a_block_comes_in_one_copy_and_is_not_copied_while_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    _, stack, _ = pair()
    offload = middleware(stack)
    run(stack)
    copied: list[int] = []
    sources = {pack.source.data_ptr(): number for number, pack in enumerate(offload.packs) if pack is not None}
    copies = offload._streamer
    assert copies is not None

    class Watched:
        wait, release = copies.wait, copies.release

        def copy(self, slot: int, target: torch.Tensor, source: torch.Tensor) -> None:
            copied.append(sources[source.data_ptr()])
            assert source.nbytes == 2 * LAYER_BYTES
            copies.copy(slot, target, source)

    monkeypatch.setattr(offload, "_streamer", Watched())
    run(stack)
    # the first one is there since the end of the run before
    assert copied == [1, 2, 3, 4, 0]


@pytest.mark.parametrize(
    ("resident", "there"), [(1, {2}), (2, {1, 3}), (4, {0, 1, 3, 4}), (5, set(range(5))), (9, set(range(5)))]
)
@torch.inference_mode()
def test_blocks_that_stay_are_not_copied(resident: int, there: set[int]) -> None:
    plain, stack, blocks = pair(resident=resident)
    offload = middleware(stack)
    assert {number for number, pack in enumerate(offload.packs) if pack is None} == there
    for _ in range(2):
        assert torch.equal(run(stack), run(plain))
    assert held(stack) == 2 * LAYER_BYTES * len(there)
    assert {held(blocks[number]) for number in there} == {2 * LAYER_BYTES}
    assert len(offload._memory) == min(2, BLOCKS - len(there))
    assert _evenly_spaced(3, 60) == {10, 30, 50}


@torch.inference_mode()
def test_blocks_have_slots_in_turns_whatever_streams_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the compiled library torch makes the copies."""
    monkeypatch.setattr(host, "_library", lambda: None)
    plain, stack, _ = pair()
    for _ in range(2):
        assert torch.equal(run(stack), run(plain))
    assert isinstance(middleware(stack)._streamer, host.TorchStreamer)


@torch.inference_mode()
def test_a_part_of_a_stack_waits_for_the_blocks_that_it_runs() -> None:
    """As under a middleware that runs some of the blocks, twice the same, or out of turn."""
    plain, stack, _ = pair()
    rows = Rows([(SimpleNamespace(), "cond")], [Row.of(img=3)], LayoutCache("cpu"))
    rows.bind("blocks", "mod", [plain.modulation(torch.ones(1, WIDTH))["blocks"]])
    carry = {"img": torch.randn(3, WIDTH)}
    for lo, hi in ((0, 1), (1, 4), (1, 2), (4, 5), (0, 5)):
        expected, got = (part._run(part, lo, hi, carry, rows)["img"] for part in (plain, stack))
        assert torch.equal(got, expected)


@torch.inference_mode()
def test_layers_that_work_ahead_of_the_steps_are_fetched_when_they_are_called() -> None:
    plain, stack, blocks = pair()
    offload = middleware(stack)
    assert [len(pack.layers) for pack in offload.packs] == [2] * BLOCKS, "those of the stream that the block carries"
    fetched: list[str] = []
    for block in blocks:
        for name, layer in block.named_children():
            if isinstance(layer, Offloaded):
                layer.fetch = lambda name=name, fetch=layer.fetch: fetched.append(name) or fetch()
    temb = torch.randn(3, WIDTH)
    assert torch.equal(stack.modulation(temb)["blocks"], plain.modulation(temb)["blocks"])
    assert fetched == ["mod"] * BLOCKS
    key = plain.group("blocks")[2].key
    assert torch.equal(blocks[2].key(temb), key(temb))
    assert fetched[BLOCKS:] == ["key"]
    assert held(stack) == 0
    fetched.clear()
    rows = Rows([(SimpleNamespace(), "cond")], [Row.of(img=3)], LayoutCache("cpu"))
    rows.bind("blocks", "mod", [plain.modulation(torch.ones(1, WIDTH))["blocks"]])
    stack({"img": temb}, rows)
    assert fetched == [], "what a step needs comes with its block"


@torch.inference_mode()
def test_gelu_is_computed_by_the_layer_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, stack, blocks = pair()
    monkeypatch.setattr(Linear, "gelu", lambda layer, x: layer(x).relu())
    x = torch.randn(3, WIDTH)
    assert torch.equal(blocks[1].up.gelu(x), plain.group("blocks")[1].up.gelu(x))
    assert held(stack) == 0


@torch.inference_mode()
def test_two_lanes_may_need_a_layer_at_once() -> None:
    plain, stack, _ = pair()
    expected, temb = run(plain), torch.randn(3, WIDTH)
    modulation = plain.modulation(temb)["blocks"]
    wrong: list[str] = []

    def prepare() -> None:
        with torch.inference_mode():
            for _ in range(40):
                if not torch.equal(stack.modulation(temb)["blocks"], modulation):
                    wrong.append("modulation")

    def step() -> None:
        with torch.inference_mode():
            for _ in range(40):
                if not torch.equal(run(stack), expected):
                    wrong.append("step")

    threads = [threading.Thread(target=work) for work in (prepare, step, step)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_after_an_error_the_weights_are_back() -> None:
    plain, stack, blocks = pair()
    hook = blocks[3].register_forward_pre_hook(lambda *_: 1 / 0)
    with torch.inference_mode(), pytest.raises(ZeroDivisionError):
        run(stack)
    hook.remove()
    assert held(stack) == 0
    with torch.inference_mode():
        assert torch.equal(run(stack), run(plain))


@torch.inference_mode()
def test_slots_that_are_given_back_are_taken_again() -> None:
    plain, stack, _ = pair()
    expected = run(plain)
    assert torch.equal(run(stack), expected)
    offload = stack._run.func.__self__  # type: ignore[attr-defined]
    assert sum(slot.nbytes for slot in offload._memory) > 0
    offload.close()
    assert (offload._memory, offload.slots) == ([], [])
    assert torch.equal(run(stack), expected)
