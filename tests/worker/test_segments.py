"""Steps that take several predictions, and outputs that are finished part by part, with a made-up model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from omni_grpc.metadata import parameters_in
from omni_grpc.nn.rows import Row, Rows
from omni_grpc.pipeline.base import Finished, Outcome, Pipeline, SegmentFinished, advance
from omni_grpc.pipeline.outputs import Output
from omni_grpc.pipeline.patches import Grid
from omni_grpc.pipeline.schedule import Levels, Schedule
from omni_grpc.pipeline.state import COND, Conditioning, State, Tables
from omni_grpc.types import shared_memory as shared
from omni_grpc.types.media import VideoFormat
from omni_grpc.types.plan import RequestStep
from omni_grpc.types.request import Guidance, Request, Task
from omni_grpc.types.requested import Embedding, Requested
from omni_grpc.worker.packed import PackedRunner

EULER = {"_class_name": "FlowMatchEulerDiscreteScheduler"}


class Chunks(Pipeline):
    """Predicts the modulation of the evaluation for each token; its context tokens must not come back."""

    def __init__(self, scheduler: str, segments: int) -> None:
        super().__init__()
        self.scheduler, self.segments = scheduler, segments
        self.decoded: list[float] = []
        self.batches: list[list[float]] = []

    @classmethod
    def load(cls, loader: object) -> Chunks:
        raise NotImplementedError

    def prepare(self, request: Request) -> list[State]:
        return [self._state(request, output) for output in range(request.num_outputs)]

    def _state(self, request: Request, output: int) -> State:
        schedule = Schedule(EULER, Levels(steps=request.steps), device="cpu", name=self.scheduler)
        table = torch.tensor(schedule.timesteps).view(-1, 1, 1)
        cond = Conditioning(row=Row.of(img=6), constants={"part": ("img", torch.zeros(6, 1))}, tables=Tables(t=table))
        return State(
            request=request,
            output=output,
            seed=output,
            generator=torch.Generator(),
            latents=torch.zeros(4, 1),
            context=torch.full((2, 1), 9.0),
            grid=Grid(height=2, width=2),
            schedule=schedule,
            guidance=request.guidance,
            cond={COND: cond},
            segments=self.segments,
        )

    def predict(self, batch: Rows) -> Tensor:
        assert batch["latents"][4:6].flatten().tolist() == [9.0, 9.0]
        self.batches.append(batch["part"][::6].flatten().tolist())
        return batch["t"][batch.index["img"]] / 1000 + 0 * batch["latents"]

    def advance(self, state: State, prediction: Tensor) -> Outcome:
        outcome = advance(state, prediction)
        if not isinstance(outcome, Finished) or state.segment + 1 == state.segments:
            return outcome
        finished = state.latents
        fresh = self._state(state.request, state.output)
        state.segment += 1
        state.latents, state.schedule, state.evaluation = fresh.latents, fresh.schedule, 0
        part = {"part": ("img", torch.full((6, 1), float(state.segment)))}
        state.cond = {COND: dataclasses.replace(fresh.cond[COND], constants=part)}
        return SegmentFinished(finished + state.segment)

    def decode(self, state: State, latents: Tensor) -> list[Output]:
        self.decoded.append(float(latents[0]))
        level = round(10 * float(latents[0])) + 100
        return [Output(pixels=np.full((2, 16, 16, 3), level, np.uint8))]


def request(steps: int, outputs: int = 1) -> Request:
    return Request(
        id="job",
        model="toy",
        prompt="a star",
        task=Task.TEXT_TO_VIDEO,
        negative_prompt=None,
        width=16,
        height=16,
        steps=steps,
        guidance=Guidance(),
        seeds=tuple(range(outputs)),
        num_outputs=outputs,
        output_format=VideoFormat.MP4,
        fps=8.0,
    )


def run(runner: PackedRunner) -> list[RequestStep]:
    seen: list[RequestStep] = []
    while not seen or not seen[-1].finished:
        report = runner.step(("job",))
        assert report.broken == ()
        seen += report.progress
        if report.progress and report.progress[0].part_ready:
            part = runner.decode_part("job")
            assert (part.done, part.total) == (seen[-1].segment + 1, seen[-1].segments)
    return seen


@pytest.mark.parametrize(
    ("scheduler", "evals"),
    [("FlowMatchEulerDiscreteScheduler", [1, 1, 1]), ("FlowMatchHeunDiscreteScheduler", [2, 2, 1])],
)
def test_a_step_is_reported_when_its_last_prediction_is_made(scheduler: str, evals: list[int]) -> None:
    pipeline = Chunks(scheduler, segments=1)
    runner = PackedRunner(pipeline, torch.device("cpu"), "omni-test-again-")
    runner.prepare(request(3))
    steps = run(runner)
    assert [(it.step, it.total, it.evals) for it in steps] == [(n + 1, 3, evals[n]) for n in range(3)]
    assert len(pipeline.batches) == sum(evals)
    schedule = Schedule(EULER, Levels(steps=3), device="cpu")
    assert [it.sigma for it in steps] == list(schedule.sigmas[:3])
    assert [it.earlier > 0 for it in steps] == [count > 1 for count in evals]


def test_parts_are_decoded_while_the_next_ones_are_made_and_joined_in_the_end() -> None:
    pipeline = Chunks("FlowMatchEulerDiscreteScheduler", segments=3)
    runner = PackedRunner(pipeline, torch.device("cpu"), "omni-test-parts-")
    runner.prepare(request(2, outputs=2))
    steps = run(runner)
    assert [(it.step, it.total, it.segment, it.segments) for it in steps] == [(n + 1, 6, n // 2, 3) for n in range(6)]
    assert [it.part_ready for it in steps] == [False, True, False, True, False, False]
    assert len(pipeline.decoded) == 4, "two outputs, two parts each, decoded before the last one was made"
    report = runner.decode("job")
    for made in report.media:
        assert shared.take(made.data)
    assert [made.num_frames for made in report.media] == [6, 6]
    assert [made.seed for made in report.media] == [0, 1]
    first = pipeline.decoded[0]
    assert pipeline.decoded == pytest.approx([first, first, first + 1, first + 1, first - 1, first - 1])
    assert pipeline.batches[::2] == [[0, 0], [1, 1], [2, 2]], "the constants of a part are those of the part"


def test_the_file_says_steps_of_each_part_and_predictions_of_all(tmp_path: Path) -> None:
    """As the reply does: what it takes to ask for the same again, and what it took."""
    runner = PackedRunner(Chunks("FlowMatchHeunDiscreteScheduler", segments=2), torch.device("cpu"), "omni-test-told-")
    asked = Requested(kind="video", model="toy", prompt="a star", options={})
    runner.prepare(dataclasses.replace(request(3), embedding=Embedding(asked=asked, defaults_used={"fps": "8"})))
    steps = run(runner)
    (made,) = runner.decode("job").media
    (tmp_path / "a.mp4").write_bytes(shared.take(made.data))
    found = parameters_in(tmp_path / "a.mp4")
    assert (found.asked, found.effective["defaults_used"]) == (asked, {"fps": "8"})
    assert (found.effective["steps"], found.effective["evals"]) == (3, sum(it.evals for it in steps)) == (3, 10)
    told = [found.effective[name] for name in ("num_frames", "output_fps", "duration")]
    assert told == [made.num_frames, made.fps, made.duration]
