"""Whose memory goes to whom: never more than the budget, and nobody waits for ever."""

import dataclasses
import random

import pytest

from omni_grpc.fleet.turns import Evict, Tenure, Wait, make_room, next_to_wake


def tenure(name, size=10, **changes):
    values = {"devices": ("0",), "awake": True, "idle": True, "last_used": 0.0, "awake_since": 0.0}
    return Tenure(name=name, bytes=size, **(values | changes))


def test_there_is_room_where_all_fit():
    models = [tenure("a"), tenure("b"), tenure("c", awake=False)]
    assert make_room("c", models, 30, now=0.0, turn=5.0) is None


def test_the_least_recently_used_of_the_idle_gives_way():
    models = [tenure("a", last_used=2.0), tenure("b", last_used=1.0), tenure("c", awake=False)]
    assert make_room("c", models, 20, now=9.0, turn=5.0) == Evict("b")


def test_one_that_has_jobs_keeps_its_memory_for_its_turn_while_another_is_idle_or_its_turn_lasts():
    busy = tenure("a", idle=False, awake_since=4.0)
    assert make_room("c", [busy, tenure("b"), tenure("c", awake=False)], 20, now=9.5, turn=5.0) == Evict("b")
    assert make_room("c", [busy, tenure("c", awake=False)], 10, now=6.0, turn=5.0) == Wait(3.0)
    assert make_room("c", [busy, tenure("c", awake=False)], 10, now=9.0, turn=5.0) == Evict("a")


def test_models_on_other_devices_are_left_alone():
    models = [tenure("a", devices=("1",)), tenure("b"), tenure("c", awake=False, devices=("0", "2"))]
    assert make_room("c", models, 10, now=0.0, turn=5.0) == Evict("b")
    assert make_room("c", models[::2], 10, now=0.0, turn=5.0) is None


def test_one_larger_than_the_budget_gets_it_alone():
    models = [tenure("a"), tenure("c", size=50, awake=False)]
    assert make_room("c", models, 20, now=0.0, turn=5.0) == Evict("a")
    assert make_room("c", models[1:], 20, now=0.0, turn=5.0) is None


def test_the_jobs_that_have_waited_for_longest_are_next():
    waiting = [tenure("a", awake=False, waiting_since=3.0), tenure("b", awake=False, waiting_since=2.0), tenure("c")]
    assert next_to_wake(waiting) == "b"
    assert next_to_wake(waiting[2:]) is None


@pytest.mark.parametrize("seed", range(20))
def test_with_any_load_no_model_waits_longer_than_the_turns_of_the_others(seed):
    """A clock of seconds: jobs come at random, running ones end at random, and models move as they are told."""
    draw = random.Random(seed)
    names, budget, turn, job_seconds = "abcde", draw.choice([10, 20, 25]), 5.0, 3
    sizes = {name: draw.choice([5, 10]) for name in names}
    always_busy = draw.sample(names, 3)
    models = {name: tenure(name, sizes[name], awake=False, idle=True) for name in names}
    jobs = dict.fromkeys(names, 0)
    waited = dict.fromkeys(names, 0.0)
    for now in range(2000):
        for name in names:
            if name in always_busy:
                jobs[name] = max(jobs[name], 1)
            elif draw.random() < 0.01:
                jobs[name] += 1
            one = models[name]
            if one.awake and jobs[name] and draw.random() < 0.5:
                jobs[name] -= 1
            wants = jobs[name] > 0 and not one.awake
            since = (one.waiting_since if one.waiting_since is not None else float(now)) if wants else None
            models[name] = dataclasses.replace(
                one,
                idle=one.awake and not jobs[name],
                waiting_since=since,
                last_used=now if jobs[name] else one.last_used,
            )
        while (name := next_to_wake(list(models.values()))) is not None:
            step = make_room(name, list(models.values()), budget, now=float(now), turn=turn)
            if isinstance(step, Evict):
                one = models[step.name]
                assert one.awake
                again = float(now) if jobs[step.name] else None
                models[step.name] = dataclasses.replace(one, awake=False, idle=False, waiting_since=again)
            elif step is None:
                since = models[name].waiting_since
                waited[name] = max(waited[name], now - since)
                models[name] = dataclasses.replace(
                    models[name], awake=True, idle=False, waiting_since=None, awake_since=float(now)
                )
            else:
                assert step.seconds > 0
                break
        assert sum(one.bytes for one in models.values() if one.awake) <= max(budget, *sizes.values())
    assert max(waited.values()) <= len(names) * (turn + job_seconds)
