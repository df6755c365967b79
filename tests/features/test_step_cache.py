"""What the step cache keeps and forgets, on a made-up stack whose blocks add what the test says."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from omni_grpc.config import CacheConfig
from omni_grpc.features import Context, Effects
from omni_grpc.features.step_cache import apply
from omni_grpc.nn.dual_stream import DualStreamBlock
from omni_grpc.nn.rows import LayoutCache, Row, Rows
from omni_grpc.nn.stack import Block, Stack, main_stack
from omni_grpc.pipeline.base import AnotherPrediction, Finished, SegmentFinished
from omni_grpc.pipeline.batch import advance
from omni_grpc.pipeline.patches import Grid
from omni_grpc.pipeline.schedule import Levels, Schedule
from omni_grpc.pipeline.state import COND, UNCOND, State
from omni_grpc.types.media import ImageFormat
from omni_grpc.types.request import Guidance, Request, Task
from omni_grpc.types.step_cache import TeaCache
from tests.toy import toy_spec

EULER, HEUN = "FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler"
LAYOUTS = LayoutCache("cpu")


class Adds(Block):
    """Adds a number that changes with each call, and gives its input as the signal."""

    carry = ("img",)

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []

    def modulation(self, temb: Tensor) -> Tensor:
        return temb

    def forward(self, *carry: Tensor, rows: Rows, mod: Tensor, **constants: Tensor) -> tuple[Tensor, ...]:
        self.calls.append(len(rows))
        return (carry[0] + len(self.calls),)

    def signal(self, *carry: Tensor, rows: Rows, mod: Tensor, **constants: Tensor) -> Tensor:
        return carry[0]


def cached(*lengths: int, component: str = "transformer", names: tuple[str, ...] = ("stack",)) -> nn.Module:
    """A denoiser with a stack of each length, whose main one has a cache."""
    module = stacked(*lengths, names=names)
    apply(module, CacheConfig(), context(component))
    return module


def stacked(*lengths: int, names: tuple[str, ...] = ("stack",)) -> nn.Module:
    module = nn.Module()
    for name, length in zip(names, lengths, strict=True):
        module.add_module(name, Stack(blocks=[Adds() for _ in range(length)]))
    return module


def context(component: str = "transformer", **more: Effects) -> Context:
    return Context(component=component, spec=toy_spec(), device=torch.device("cpu"), dtype=torch.float32, **more)


def state(
    steps: int = 6,
    *,
    threshold: float | None = 1e9,
    coefficients: tuple[float, ...] = (1.0, 0.0),
    scheduler: str = EULER,
) -> State:
    request = Request(
        id="job",
        model="toy",
        prompt="a star",
        task=Task.TEXT_TO_IMAGE,
        negative_prompt=None,
        width=16,
        height=16,
        steps=steps,
        guidance=Guidance(),
        seeds=(0,),
        num_outputs=1,
        output_format=ImageFormat.PNG,
        cache=None if threshold is None else TeaCache(rel_l1_thresh=threshold, coefficients=coefficients),
    )
    return State(
        request=request,
        output=0,
        seed=0,
        generator=torch.Generator(),
        latents=torch.zeros(4, 1),
        grid=Grid(height=2, width=2),
        schedule=Schedule({"_class_name": EULER}, Levels(steps=steps), device="cpu", name=scheduler),
        guidance=Guidance(),
    )


def forward(module: nn.Module, *inputs: tuple[State, str, float], stack: str = "stack") -> list[float]:
    """One evaluation of rows whose four tokens all have one value -> what comes out for each row."""
    rows = Rows([(it, branch) for it, branch, _ in inputs], [Row.of(img=4)] * len(inputs), LAYOUTS)
    part = module.get_submodule(stack)
    rows.bind("blocks", "mod", [torch.zeros(1, len(part), 1)] * len(inputs))
    out = part({"img": torch.cat([torch.full((4, 1), value) for _, _, value in inputs])}, rows)["img"]
    assert (out.view(-1, 4) == out.view(-1, 4)[:, :1]).all()
    return out[::4, 0].tolist()


def calls(module: nn.Module, stack: str = "stack") -> list[int]:
    return module.get_submodule(f"{stack}.blocks.0").calls


def trace(module: nn.Module, it: State, values: list[float], stack: str = "stack") -> list[int]:
    """Evaluates a state once for each value -> how many rows were computed each time."""
    before = len(calls(module, stack))
    computed = []
    for value in values:
        seen = len(calls(module, stack))
        forward(module, (it, COND, value), stack=stack)
        computed.append(sum(calls(module, stack)[seen:]))
        it.evaluation += 1
    assert len(calls(module, stack)) - before == sum(computed)
    return computed


# --- decisions --------------------------------------------------------------------------------------------------------


def test_the_first_and_the_last_step_are_computed_and_others_by_what_has_added_up() -> None:
    assert trace(cached(1), state(6), [1.0] * 6) == [1, 0, 0, 0, 0, 1]
    # changes of 10 % each against a threshold of 25 %: two are let pass, the third adds up to 30 %
    values = [1.1**n for n in range(9)]
    assert trace(cached(1), state(9, threshold=0.25), values) == [1, 0, 0, 1, 0, 0, 1, 0, 1]
    assert trace(cached(1), state(9, threshold=0.0), [1.0] * 9) == [1] * 9


def test_coefficients_rescale_a_change_highest_power_first() -> None:
    values = [1.1**n for n in range(6)]
    # 2 * 0.1^2 + 0.5 * 0.1 + 0.03 = 0.1; and the absolute value of its negative
    for coefficients in ((2.0, 0.5, 0.03), (-2.0, -0.5, -0.03)):
        assert trace(cached(1), state(6, threshold=0.25, coefficients=coefficients), values) == [1, 0, 0, 1, 0, 1]
    assert trace(cached(1), state(6, threshold=0.25, coefficients=(5.0, 0.0)), values) == [1] * 6


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_a_change_that_is_no_number_is_computed(odd: float) -> None:
    module, it = cached(1), state(6)
    forward(module, (it, COND, 1.0))
    it.evaluation = 1
    module.stack.group("blocks")[0].signal = lambda *carry, **_: torch.full_like(carry[0], odd)
    assert len(calls(module)) == 1
    rows = Rows([(it, COND)], [Row.of(img=4)], LAYOUTS)
    rows.bind("blocks", "mod", [torch.zeros(1, 1, 1)])
    module.stack({"img": torch.zeros(4, 1)}, rows)
    assert len(calls(module)) == 2


def test_what_was_zero_before_is_computed() -> None:
    assert trace(cached(1), state(6), [0.0, 1.0, 1.0, 1.0]) == [1, 1, 0, 0]


def test_an_answer_is_the_input_and_what_was_added_last() -> None:
    module, it = cached(1), state(6)
    assert forward(module, (it, COND, 1.0)) == [2.0]
    it.evaluation = 1
    assert forward(module, (it, COND, 1.5)) == [2.5]
    assert len(calls(module)) == 1


def test_rows_are_decided_one_by_one() -> None:
    module = cached(1)
    steady, moving, off = state(6, threshold=0.1), state(6, threshold=0.1), state(6, threshold=None)
    forward(module, (steady, COND, 1.0), (moving, COND, 1.0), (off, COND, 1.0))
    for it in (steady, moving, off):
        it.evaluation = 1
    # computed rows get 2 now, the answered one its 1 of before
    assert forward(module, (moving, COND, 3.0), (steady, COND, 1.05), (off, COND, 1.0)) == [
        5.0, pytest.approx(2.05), 3.0
    ]  # fmt: skip
    assert calls(module) == [3, 2]
    assert [sum(count.hits for count in it.reports.values()) for it in (steady, moving, off)] == [1, 0, 0]
    assert [sum(count.misses for count in it.reports.values()) for it in (steady, moving, off)] == [1, 2, 0]
    assert off.slots == {}


def test_changes_are_summed_over_all_tokens_of_a_row_wherever_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """On this rank nothing moves; another one, which has the rest of the tokens, tells of a change of a half."""
    seen: list[tuple[int, ...]] = []

    def totals(rows: Rows, per_row: Tensor) -> Tensor:
        seen.append(tuple(per_row.shape))
        return per_row + torch.tensor([4.0, 4.0])

    module, still, off = cached(1), state(6, threshold=0.4), state(6, threshold=None)
    forward(module, (still, COND, 1.0), (off, COND, 1.0))
    still.evaluation = off.evaluation = 1
    monkeypatch.setattr(Rows, "totals", totals)
    forward(module, (still, COND, 1.0), (off, COND, 1.0))
    assert seen == [(2, 2)], "one exchange for all rows, the unknown among them, so that ranks agree on its shape"
    assert calls(module) == [2, 2]
    assert [count.change for count in still.reports.values()] == [0.5]


def test_what_is_kept_owns_its_memory() -> None:
    module, one, other = cached(2), state(6), state(6)
    forward(module, (one, COND, 1.0), (other, COND, 2.0))
    (memory,) = one.slots.values()
    for tensor in (memory.compared, *memory.residuals[0][1].values()):
        assert tensor.untyped_storage().nbytes() == 4 * 4


# --- what ends a memory -----------------------------------------------------------------------------------------------


def test_a_branch_that_guidance_left_out_for_a_while_starts_afresh() -> None:
    module, it = cached(1), state(9)
    for branches in ((COND, UNCOND), (COND, UNCOND), (COND,), (COND, UNCOND), (COND, UNCOND)):
        forward(module, *((it, branch, 1.0) for branch in branches))
        it.evaluation += 1
    assert calls(module) == [2, 1], "all of the first, then the one that came back"
    assert {branch: count.hits for (_, branch), count in it.reports.items()} == {UNCOND: 2, COND: 4}


def test_an_evaluation_that_is_taken_again_is_computed() -> None:
    """As when the forward that it shared failed for a neighbour after the blocks."""
    module, it = cached(1), state(9)
    forward(module, (it, COND, 1.0))
    it.evaluation = 1
    forward(module, (it, COND, 1.0))
    assert len(calls(module)) == 1
    forward(module, (it, COND, 1.0))
    assert len(calls(module)) == 2


def test_an_evaluation_that_failed_in_the_blocks_is_computed_when_it_is_taken_again() -> None:
    """What is remembered was overwritten by then: against itself, nothing would have changed."""
    module, it = cached(1), state(9, threshold=0.1)
    forward(module, (it, COND, 1.0))
    it.evaluation = 1
    hook = module.stack.group("blocks")[0].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        forward(module, (it, COND, 50.0))
    hook.remove()
    forward(module, (it, COND, 50.0))
    assert len(calls(module)) == 2


def test_steps_of_two_evaluations_are_answered_one_evaluation_at_a_time() -> None:
    it = state(4, scheduler=HEUN)
    assert it.schedule.evaluations == 7
    # both evaluations of the first step, none of the two in the middle, the one of the last
    assert trace(cached(1), it, [1.0] * 7) == [1, 1, 0, 0, 0, 0, 1]


def test_the_end_of_a_segment_empties_the_slots_and_the_next_one_is_computed() -> None:
    class Two:
        def guidance(self, it: State) -> Guidance:
            return it.guidance

        def advance(self, it: State, prediction: Tensor) -> object:
            it.evaluation += 1
            if it.evaluation < 3:
                return AnotherPrediction()
            it.segment, it.evaluation = it.segment + 1, 0
            return SegmentFinished(it.latents) if it.segment < 2 else Finished()

    module, it = cached(1), state(3)
    kept = []
    for _ in range(6):
        forward(module, (it, COND, 1.0))
        advance(Two(), it, {COND: torch.zeros(4, 1)})
        kept.append(len(it.slots))
    assert kept == [1, 1, 0, 1, 1, 0]
    assert len(calls(module)) == 4, "the first and the last step of both"
    # even where nobody emptied them
    it.segment, it.evaluation = 7, 0
    forward(module, (it, COND, 1.0))
    it.segment, it.evaluation = 8, 1
    forward(module, (it, COND, 1.0))
    assert len(calls(module)) == 6


# --- which stack ------------------------------------------------------------------------------------------------------


def test_the_longest_stack_is_the_main_one() -> None:
    module = cached(1, 3, 2, names=("refiner", "stack", "other"))
    it = state(6)
    assert trace(module, it, [1.0, 1.0], "stack") == [1, 0]
    assert trace(module, state(6), [1.0, 1.0], "refiner") == [1, 1]
    assert main_stack(module)[0] == "stack"


@pytest.mark.parametrize(("lengths", "found"), [((2, 2), "a, b"), ((), "none")])
def test_where_no_stack_is_the_longest_it_is_an_error(lengths: tuple[int, ...], found: str) -> None:
    with pytest.raises(ValueError, match=f"no single longest stack of blocks: {found}"):
        cached(*lengths, names=("a", "b")[: len(lengths)])


def test_two_denoisers_of_a_model_do_not_mix_their_memories() -> None:
    """Two experts, each with a stack of the same path, in turns."""
    high, low = cached(1, component="transformer"), cached(1, component="transformer_2")
    it = state(9)
    assert trace(high, it, [1.0, 1.0]) == [1, 0]
    assert trace(low, it, [1.0, 1.0]) == [1, 0], "the first evaluation of the second expert is computed"
    assert {count.component for count in it.reports.values()} == {"transformer", "transformer_2"}
    assert len(it.slots) == 2


# --- the signal of a block --------------------------------------------------------------------------------------------


def test_the_signal_of_a_block_is_what_it_adds_unless_it_has_a_cheaper_one() -> None:
    class Plain(Adds):
        signal = Block.signal

    stack = Stack(blocks=[Plain(), Adds()])
    rows = Rows([(state(), COND)], [Row.of(img=4)], LAYOUTS)
    rows.bind("blocks", "mod", [torch.zeros(1, 2, 1)])
    name, signal = stack.signal(0, {"img": torch.full((4, 1), 5.0)}, rows)
    assert (name, signal.flatten().tolist()) == ("img", [1.0] * 4)


def test_the_signal_of_a_dual_stream_block_is_what_the_attention_of_the_image_reads() -> None:
    block = DualStreamBlock(num_heads=2, head_size=8).requires_grad_(False)
    stack = Stack(dual=[block])
    rows = Rows([(state(), COND)] * 2, [Row.of(txt=3, img=4), Row.of(txt=2, img=5)], LAYOUTS)
    generator = torch.Generator().manual_seed(0)
    rows.bind("dual", "mod", [torch.randn(1, 1, 12 * 16, generator=generator) for _ in range(2)])
    rows.bind("rope", "joint", [torch.randn(7, 4, 2, generator=generator) for _ in range(2)])
    carry = {name: torch.randn(rows.stream(name).total, 16, generator=generator) for name in ("txt", "img")}
    read: list[Tensor] = []
    hook = block.attn.to_qkv.register_forward_pre_hook(lambda layer, inputs: read.append(inputs[0]))
    name, signal = stack.signal(0, carry, rows)
    assert read == [], "it costs no product of matrices"
    stack(carry, rows)
    hook.remove()
    assert name == "img"
    assert torch.equal(signal, read[0])
