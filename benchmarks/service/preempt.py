"""An urgent job comes while a long one takes its steps: when does it start, and is the long one's image unchanged?"""

from __future__ import annotations

import dataclasses
import statistics
import time
from pathlib import Path

from omni_grpc.client import Client, ImageOptions
from omni_grpc.v1.event_pb2 import JobEvent

from .arrivals import STEP, log
from .report import Result, spread
from .server import PATIENCE, Server, served

FLAGS = ("--policy", "priority", "--max-num-seqs", "1")
KINDS = ("preempted", "resumed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numbers:
    rounds: int = 5
    size: int = 256
    low_steps: int = 64
    high_steps: int = 4
    lead: int = 8
    """Steps that the low job takes before the high one comes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Round:
    """One preemption; times in milliseconds. `step` is what one step of the low job takes."""

    first_step: float
    high_total: float
    step: float
    aside: float
    events: tuple[str, ...]
    completed_before: int
    same_image: bool


def run(checkpoint: Path) -> Result:
    with served(checkpoint, *FLAGS) as server:
        return measure(server, Numbers())


def measure(server: Server, numbers: Numbers) -> Result:
    low = ImageOptions(
        width=numbers.size,
        height=numbers.size,
        steps=numbers.low_steps,
        seed=1,
        priority=0,
        negative_prompt="blurry",
        output_format="RAW_RGB8",
    )
    with Client(server.address) as client:
        solo = client.generate_image("a red circle", timeout=PATIENCE, **low).files[0]
        rounds = [_round(client, numbers, low, solo) for _ in range(numbers.rounds)]
    return _result(numbers, rounds)


def _round(client: Client, numbers: Numbers, low: ImageOptions, solo: bytes) -> Round:
    low_id = client.create_job("a red circle", **low).job_id
    for event in client.watch_job(low_id, timeout=PATIENCE):
        if event.HasField(STEP) and event.step_progress.step >= numbers.lead:
            break
    called = time.time()
    high = client.create_job(
        "a blue square", width=numbers.size, height=numbers.size, steps=numbers.high_steps, seed=2, priority=10
    )
    events = log(client, high.job_id)
    result = client.watch_job(low_id, timeout=PATIENCE).result()
    ours = log(client, low_id)
    preempted = [event for event in ours if event.HasField("preempted")]
    return Round(
        first_step=1000 * (next(_at(event) for event in events if event.HasField(STEP)) - called),
        high_total=1000 * (_at(events[-1]) - called),
        step=1000 * statistics.median(_took(event) for event in ours if event.HasField(STEP)),
        aside=sum(event.resumed.wait.ToNanoseconds() / 1e6 for event in ours if event.HasField("resumed")),
        events=tuple(kind for event in ours if (kind := event.WhichOneof("event") or "") in KINDS),
        completed_before=preempted[0].preempted.completed_steps if preempted else 0,
        same_image=result.files[0] == solo,
    )


def _at(event: JobEvent) -> float:
    return event.time.ToNanoseconds() / 1e9


def _took(event: JobEvent) -> float:
    return event.step_progress.step_time.ToNanoseconds() / 1e9


def _result(numbers: Numbers, rounds: list[Round]) -> Result:
    same = sum(it.same_image for it in rounds)
    regular = sum(it.events == KINDS for it in rounds)
    problems = []
    if same != len(rounds):
        problems.append(f"{len(rounds) - same} images of preempted jobs differ from the solo one")
    if regular != len(rounds):
        problems.append(f"the low job's events were {[it.events for it in rounds]}, expected {KINDS} each time")
    return Result(
        columns=("what", f"of {len(rounds)} preemptions"),
        rows=[
            (
                f"{numbers.high_steps}-step job of priority 10: to its first step",
                spread([it.first_step for it in rounds], "ms"),
            ),
            ("... to its end, decode included", spread([it.high_total for it in rounds], "ms")),
            (f"{numbers.low_steps}-step job of priority 0: one step", spread([it.step for it in rounds], "ms")),
            ("... preempted, then resumed", f"{regular} of {len(rounds)}"),
            ("... set aside for", spread([it.aside for it in rounds], "ms")),
            ("... image equal to its solo one, bit for bit", f"{same} of {len(rounds)}"),
        ],
        figures={"size": numbers.size, "rounds": [dataclasses.asdict(it) for it in rounds]},
        problems=problems,
    )
