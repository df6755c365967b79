"""What people see while a job runs."""

import io

import pytest

from omni_grpc.client.progress import describe, progress_display
from omni_grpc.types.events import Completed, DecodeProgress, EncodeDone, Queued, Started, StepProgress
from omni_grpc.types.media import ImageFormat
from omni_grpc.types.request import Guidance
from omni_grpc.types.results import Effective, RequestWarning, Stats

WARNING = RequestWarning(code="CFG_OFF", field="negative_prompt", message="[is] not set")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def step(n, total, eta=1.5):
    return StepProgress(
        step=n, total_steps=total, sigma=1, timestep=1, step_time=0.25, elapsed=n * 0.25, eta=eta, rows_total=1
    )


def events(total):
    warnings = (WARNING,)
    started = Started(
        model="toy", seeds=(7, 8), width=64, height=32, total_steps=total, queue_wait=0, warnings=warnings
    )
    effective = Effective(
        width=64, height=32, steps=total, evals=total, seeds=(7, 8), guidance=Guidance(), scheduler="x",
        output_format=ImageFormat.PNG,
    )  # fmt: skip
    done = Completed(artifacts=(), effective=effective, warnings=warnings, stats=Stats(total=2.0))
    steps = [step(n, total) for n in range(1, total + 1)]
    encoded, decoding = EncodeDone(elapsed=0.1, prompt_tokens=5), DecodeProgress(done_units=0, total_units=2)
    return [Queued(position=2, queue_depth=3), started, encoded, *steps, decoding, done]


def show(total, stream, enabled=True):
    with progress_display(enabled, stream) as display:
        for event in [*events(total), None]:
            display(event)
    return stream.getvalue()


def test_lines_without_a_terminal():
    assert show(3, io.StringIO()).splitlines() == [
        "queued: 2 ahead of it",
        "warning: CFG_OFF negative_prompt: [is] not set",
        "started: toy, 64 x 32, 3 steps, seeds 7, 8",
        "encoded: 5 tokens in 0.10 s",
        "step 1/3  0.25 s/step  1.5 s left",
        "step 2/3  0.25 s/step  1.5 s left",
        "step 3/3  0.25 s/step  1.5 s left",
        "decoding: 0/2",
        "done: 0 output(s) in 2.00 s",
    ]


@pytest.mark.parametrize(("total", "lines"), [(10, 10), (11, 10), (50, 10), (200, 10)])
def test_many_steps_are_not_many_lines(total, lines):
    steps = [line for line in show(total, io.StringIO()).splitlines() if line.startswith("step")]
    assert len(steps) == lines
    assert steps[-1].startswith(f"step {total}/{total}")


def test_a_bar_on_a_terminal():
    shown = show(4, Terminal())
    assert "\x1b[" in shown
    assert shown.count("warning: CFG_OFF negative_prompt: [is] not set") == 1
    assert "\x1b[32m" + "\u2501" * 40 in shown  # the whole bar, in green
    assert "0 output(s) in 2.00 s" in shown


def test_nothing_where_nothing_is_asked_for():
    assert show(4, Terminal(), enabled=False) == ""


def test_an_unknown_time_left_is_not_shown():
    assert describe(step(1, 4, eta=float("nan"))) == "step 1/4  0.25 s/step"
