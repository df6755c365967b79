"""A session by itself: calls that copy their scheduler, have several, or none of its steps."""

from __future__ import annotations

import copy
import inspect
import threading

import pytest
import torch
from diffusers import EulerDiscreteScheduler

from omni_grpc.adapter.session import Session
from omni_grpc.types.errors import OperationCancelled


def session(call, schedulers, loops=None):
    ended = []
    made = Session(
        call,
        schedulers,
        loops=[(scheduler, 3) for scheduler in schedulers] if loops is None else loops,
        total=lambda s: len(s.timesteps),
        clean_up=ended.append,
    )
    return made, ended


def denoise(scheduler, steps):
    scheduler.set_timesteps(steps)
    sample = torch.ones(1, 4, 2, 2)
    for timestep in scheduler.timesteps:
        sample = scheduler.step(sample * 0.1, timestep, sample).prev_sample
    return sample


def advance_all(made):
    moves = []
    while not moves or not moves[-1].finished:
        moves.append(made.advance())
    return [(move.step, move.total) for move in moves]


def test_a_copy_of_the_scheduler_steps_by_itself():
    scheduler = EulerDiscreteScheduler()

    def call():
        scheduler.set_timesteps(3)
        twin = copy.deepcopy(copy.deepcopy(scheduler))
        first = denoise(twin, 5)  # an inner loop, as for a second kind of output
        assert twin.step_index == 5
        assert scheduler.step_index is None
        return first, denoise(scheduler, 3)

    made, ended = session(call, [scheduler])
    made.start()
    assert advance_all(made) == [(1, 3), (2, 3), (3, 3)]
    first, second = made.output()
    assert torch.equal(first, denoise(EulerDiscreteScheduler(), 5))
    assert torch.equal(second, denoise(EulerDiscreteScheduler(), 3))
    assert ended == [False]
    assert scheduler.step_index is None
    assert scheduler.num_inference_steps is None
    assert "step" not in vars(scheduler)


def test_the_signature_of_step_stays():
    scheduler = EulerDiscreteScheduler()
    seen = []
    made, _ = session(lambda: seen.append(inspect.signature(scheduler.step)), [scheduler])
    made.start()
    made.output()
    assert seen == [inspect.signature(scheduler.step)]
    assert "generator" in seen[0].parameters


def test_the_loops_of_several_schedulers_follow_each_other():
    one, two = EulerDiscreteScheduler(), EulerDiscreteScheduler()
    ends = threading.Event()

    def call():
        denoise(one, 2)
        denoise(two, 3)
        ends.wait()  # the decode

    made, _ = session(call, [one, two], [(two, 3), (one, 2)])
    made.start()
    # the whole is known from the first step on, and its end before that of the decode
    assert advance_all(made) == [(1, 5), (2, 5), (3, 5), (4, 5), (5, 5)]
    ends.set()
    made.output()


def test_a_loop_that_is_longer_than_planned_moves_the_total_once():
    one, two = EulerDiscreteScheduler(), EulerDiscreteScheduler()
    made, _ = session(lambda: (denoise(one, 2), denoise(two, 4)), [one, two], [(one, 2), (two, 3)])
    made.start()
    assert advance_all(made) == [(1, 5), (2, 6), (3, 6), (4, 6), (5, 6), (6, 6)]


def test_a_scheduler_that_goes_along_with_another_has_no_steps_of_its_own():
    main, along = EulerDiscreteScheduler(), EulerDiscreteScheduler()

    def call():
        main.set_timesteps(2)
        along.set_timesteps(2)
        sample = torch.ones(1, 4, 2, 2)
        for timestep in main.timesteps:
            sample = main.step(sample, timestep, sample).prev_sample
            along.step(sample, timestep, sample)

    made, _ = session(call, [main, along], [(main, 2)])
    made.start()
    assert advance_all(made) == [(1, 2), (2, 2)]
    made.output()
    assert (along.step_index, along.num_inference_steps) == (None, None)


def test_a_call_without_steps_is_finished_at_once():
    made, _ = session(lambda: "output", [EulerDiscreteScheduler()])
    made.start()
    move = made.advance()
    assert (move.step, move.total, move.finished) == (0, 0, True)
    assert made.output() == "output"


def test_a_stop_is_no_exception_that_a_pipeline_could_catch():
    scheduler = EulerDiscreteScheduler()

    def call():
        try:
            return denoise(scheduler, 3)
        except Exception:  # noqa: BLE001 - this is the point
            return "caught"

    made, ended = session(call, [scheduler])
    made.start()
    made.advance()
    made.stop()
    with pytest.raises(OperationCancelled):
        made.output()
    made.join()
    assert ended == [True]


def test_what_the_call_raises_comes_out():
    made, ended = session(lambda: 1 / 0, [EulerDiscreteScheduler()])
    with pytest.raises(ZeroDivisionError):
        made.start()
    made.join()
    assert ended == [True]
    assert not made.began
