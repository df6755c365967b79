"""Load tests: arrivals, mixes, objectives, the search, and the command against a server with a worker that is fake."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import signal
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

from omni_grpc.cli.bench.figures import quantile
from omni_grpc.cli.bench.serve import measures, mix, plot, slo
from omni_grpc.cli.bench.serve.arrivals import BURSTS, CONSTANT, POISSON, Bursts, Process, bursts
from omni_grpc.cli.bench.serve.record import Record, read
from omni_grpc.cli.bench.serve.search import Found, search
from omni_grpc.cli.bench.serve.trace import read_trace
from omni_grpc.engine import JobState
from omni_grpc.engine.scheduler import Lane
from omni_grpc.types.errors import ConfigError
from omni_grpc.v1 import event_pb2
from tests.cli.conftest import Run
from tests.cli.test_signals import ENVIRONMENT, ROOT
from tests.server.service import Service, serving, until

RATE, SECONDS = 20.0, 500.0
QUICK = ("--requests", 6, "--rate", 200, "--sample", 0.05, "--seed", 7)


# --- arrivals ---------------------------------------------------------------------------------------------------------


def test_poisson_arrivals_have_the_rate_and_the_spread_of_a_poisson_process() -> None:
    times = Process(kind=POISSON).times(RATE, SECONDS, None, seed=3)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    # the mean of so many differs from the true one by more than 4 sigma once in 16,000 seeds
    assert len(times) == pytest.approx(RATE * SECONDS, abs=4 * (RATE * SECONDS) ** 0.5)
    assert statistics.stdev(gaps) == pytest.approx(statistics.fmean(gaps), rel=0.05)
    # counts in windows: the variance is the mean
    counts = [sum(second <= time < second + 1 for time in times[: int(60 * RATE)]) for second in range(50)]
    assert 0.5 < statistics.variance(counts) / statistics.fmean(counts) < 2.0
    assert times == Process(kind=POISSON).times(RATE, SECONDS, None, seed=3) != Process().times(RATE, SECONDS, None, 4)


def test_constant_arrivals_are_as_far_from_each_other() -> None:
    assert Process(kind=CONSTANT).times(4.0, 1.0, None, 0) == [0.0, 0.25, 0.5, 0.75]
    assert Process(kind=CONSTANT).times(4.0, None, 3, 0) == [0.0, 0.25, 0.5]


def test_bursts_keep_the_mean_rate_and_come_in_their_time_alone() -> None:
    times = Process(kind=BURSTS, bursts=Bursts(2.0, 8.0)).times(RATE, SECONDS, None, seed=1)
    assert len(times) == pytest.approx(RATE * SECONDS, rel=0.05)
    assert all(time % 10.0 < 2.0 for time in times)
    assert times == sorted(times)


@pytest.mark.parametrize("text", ["5", "0/5", "5/-1", "a/b", "1/2/3", "nan/1", "inf/1"])
def test_bursts_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="ON/OFF"):
        bursts(text)


# --- mixes and traces -------------------------------------------------------------------------------------------------


def test_a_mix_comes_by_its_weights() -> None:
    classes = mix.mix("512x512:20:3,1024x768:30:1,64x64")
    assert [(it.name, it.weight, dict(it.options)) for it in classes] == [
        ("512x512:20", 3.0, {"width": 512, "height": 512, "steps": 20}),
        ("1024x768:30", 1.0, {"width": 1024, "height": 768, "steps": 30}),
        ("64x64", 1.0, {"width": 64, "height": 64}),
    ]
    picked = list(itertools.islice(mix.picks(classes, 5), 5000))
    assert picked.count("512x512:20") / 5000 == pytest.approx(0.6, abs=0.03)
    assert picked == list(itertools.islice(mix.picks(classes, 5), 5000))


@pytest.mark.parametrize("text", ["", "512", "512x512:20:3:1", "ax512", "512x512:-1"])
def test_a_mix_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="WIDTHxHEIGHT:STEPS:WEIGHT"):
        mix.mix(text)


FILE = """
classes:
- {name: small, weight: 3, width: 512, height: 512, steps: 20, slo: "e2e=2s", prompt: a cat}
- name: styled
  loras: {toon: 0.8}
  prompts: [one, two]
  fields: {sampling: {cache: {off: true}}}
"""


def test_a_mix_file_has_options_fields_and_objectives(tmp_path: Path) -> None:
    file = tmp_path / "mix.yaml"
    file.write_text(FILE, "utf-8")
    small, styled = mix.mix_file(file)
    assert (small.name, small.weight, small.prompts) == ("small", 3, ("a cat",))
    assert dict(small.options) == {"width": 512, "height": 512, "steps": 20}
    assert small.slo is not None
    assert dict(small.slo.limits) == {"e2e": 2.0}
    assert (styled.weight, styled.prompts, styled.slo) == (1, ("one", "two"), None)
    assert dict(styled.options) == {"loras": {"toon": 0.8}}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- {widht: 3}", "class 1: widht is no option of image; did you mean 'width'"),
        ("- {kind: film}", "class 1: kind is 'film', expected one of image"),
        ("- {weight: many}", "class 1: weight is 'many', expected a number"),
        ("- {slo: e2e}", "class 1: slo 'e2e' is no objective"),
        ("- {prompts: one}", "class 1: prompts is 'one', expected a list of texts"),
        ("[3]", "class 1 is 3, expected a mapping"),
        ("- {name: a}\n- {name: a}", "has a twice"),
        ("- {weight: 0}", "has weights that are below 0, or all 0"),
        ("{}", "has no list of classes"),
        ("a: [", "is no YAML"),
    ],
)
def test_a_mix_file_names_what_is_wrong(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "mix.yaml"
    file.write_text(text, "utf-8")
    with pytest.raises(ConfigError) as refused:
        mix.mix_file(file)
    assert said in str(refused.value)


def test_a_trace_is_played_from_its_first_request_on(tmp_path: Path) -> None:
    known = mix.mix("64x64:4")
    lines = tmp_path / "trace.jsonl"
    lines.write_text(
        '{"time": 12, "width": 32, "height": 32, "prompt": "b"}\n\n{"time": 10, "class": "64x64:4"}\n', "utf-8"
    )
    trace = read_trace(lines, known, speed=2.0)
    assert (trace.times, trace.names) == ([0.0, 1.0], ["64x64:4", "32x32"])
    assert [(it.name, it.prompts, dict(it.options)) for it in trace.classes] == [
        ("32x32", ("b",), {"width": 32, "height": 32})
    ]
    table = tmp_path / "trace.csv"
    table.write_text("time,width,height,steps,prompt\n0,32,32,4,a\n0.5,32,32,4,b\n1,,,,\n", "utf-8")
    trace = read_trace(table, known, speed=1.0)
    assert (trace.times, trace.names) == ([0.0, 0.5, 1.0], ["32x32:4", "32x32:4", "64x64:4"])
    assert [it.prompts for it in trace.classes] == [("a", "b")]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"class": "a"}', "line 1: time is None, expected seconds from 0"),
        ('{"time": -1}', "line 1: time is -1"),
        ('{"time": 0, "class": "x"}', "line 1: class is 'x', which is not in the mix"),
        ('{"time": 0, "class": "64x64:4", "width": 3}', "line 1 has a class and options"),
        ('{"time": 0, "widht": 3}', "line 1: widht is no option of image; did you mean 'width'"),
        ("time,width", "line 1 is not JSON"),
        ("", "has no requests"),
    ],
)
def test_a_trace_names_the_line_that_is_wrong(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(text, "utf-8")
    with pytest.raises(ConfigError) as refused:
        read_trace(file, mix.mix("64x64:4"), 1.0)
    assert said in str(refused.value)


# --- measures ---------------------------------------------------------------------------------------------------------


def record(number: int, took: float, **more: Any) -> Record:
    at = float(number)
    values = {"sent": at, "first_event": at + 0.01, "ended": at + took, "outcome": "succeeded"}
    return Record(number=number, klass="a", scheduled=at, **{**values, **more})


def test_percentiles_are_of_the_nearest_rank() -> None:
    assert [quantile(range(1, 101), q) for q in (0.5, 0.95, 0.99)] == [50, 95, 99]
    assert [quantile([3.0, 1.0, 2.0], q) for q in (0.0, 0.5, 0.99, 1.0)] == [1.0, 2.0, 3.0, 3.0]


def test_a_latency_counts_from_when_the_request_was_due() -> None:
    """A client that is late by a second and served in a tenth of one has waited for 1.1 s."""
    late = [record(number, 1.1, sent=number + 1.0) for number in range(10)]
    found = measures.summary(late, NOTHING, offered=1.0, client_cpu=0.1)
    assert found["latency"]["e2e"]["p50"] == pytest.approx(1.1)
    assert found["client_late"]["p50"] == pytest.approx(1.0)
    assert "the client sent requests late" in measures.late(found)
    prompt = measures.summary([record(number, 0.1) for number in range(10)], NOTHING, offered=1.0, client_cpu=0.1)
    assert measures.late(prompt) == ""
    assert "cores" in measures.late({**prompt, "client_cpu_cores": 0.97})


def test_a_server_keeps_up_that_ends_soon_after_the_last_request() -> None:
    assert measures.kept_up([record(number, 0.2) for number in range(10)])
    assert measures.kept_up([record(0, 5.0)])  # one alone takes as long as it takes
    slow = [record(number, 1.0 + 2 * number) for number in range(10)]  # a third of what comes
    assert not measures.kept_up(slow)


NOTHING = measures.Objectives(run=slo.Slo({}), classes={})


def test_objectives_are_kept_by_requests_that_succeed_in_time() -> None:
    classes = {"b": slo.slo("e2e=2s,step_gap=0.1s")}
    its = measures.Objectives(run=slo.slo("e2e=500ms,first_event=20ms"), classes=classes)
    refused = Record(
        number=3, klass="a", scheduled=3.0, sent=3.0, ended=3.001, outcome="failed", code="RESOURCE_EXHAUSTED"
    )
    other = record(4, 1.9, gaps=[0.05, 0.09])
    other.klass = "b"
    records = [record(0, 0.4), record(1, 0.6), record(2, 0.4, first_event=2.03), refused, other]
    found = measures.summary(records, its, offered=None, client_cpu=0.0)
    assert (found["requests"], found["succeeded"], found["met"], found["attainment"]) == (5, 4, 2, 0.4)
    assert found["attainment_by"] == {"e2e": 3 / 5, "first_event": 2 / 4, "step_gap": 1.0}
    assert found["errors"] == {"RESOURCE_EXHAUSTED": 1}
    assert {name: its["attainment"] for name, its in found["classes"].items()} == {"a": 0.25, "b": 1.0}
    assert found["latency"]["e2e"]["count"] == 4
    assert found["goodput_per_second"] == pytest.approx(2 / 5.9)
    other.gaps.append(0.11)
    assert not its.met(other)
    assert not its.met(record(5, 0.1, outcome="interrupted"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("e3e=2s", "did you mean 'e2e'"),
        ("e2e", "no objective"),
        ("e2e=2", "no objective"),
        ("e2e=0s", "leaves no time"),
    ],
)
def test_objectives_that_are_none_are_refused(text: str, said: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=said):
        slo.slo(text)


def test_a_record_is_read_as_it_was_written() -> None:
    one = record(0, 0.4, gaps=[0.25, 0.125], retries=2)
    assert read(json.loads(json.dumps(one.as_dict()))) == one


# --- the search -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [0.02, 0.5, 0.9, 7.3])
async def test_the_search_ends_at_the_highest_rate_that_is_enough(most: float) -> None:
    tried: list[float] = []

    async def enough(rate: float) -> bool:
        tried.append(rate)
        return rate <= most

    found = await search(enough, 0.5, 0.1)
    assert found.rate is not None
    assert found.above is not None
    assert found.rate <= most < found.above <= 1.1 * found.rate
    assert len(tried) < 14


async def test_the_search_gives_up_where_no_rate_is_enough_and_ends_when_told_to() -> None:
    async def never(rate: float) -> bool:
        return False

    async def interrupted(rate: float) -> bool | None:
        return None if rate > 1 else True

    assert (await search(never, 0.5, 0.1)).rate is None
    assert await search(interrupted, 0.5, 0.1) == Found(1.0, None)


# --- the command ------------------------------------------------------------------------------------------------------


async def test_a_run_is_measured_and_written(run: Run, server: tuple[str, str], tmp_path: Path) -> None:
    file, picture = tmp_path / "a.json", tmp_path / "a.png"
    kinds = ("--mix", "64x32:4:1,32x32:2:1", "--set", "preview_every_steps=1", "--slo", "e2e=30s")
    ran = await run("bench", "serve", *server, *QUICK, *kinds, "--json", file, "--plot", picture)
    assert ran.code == 0, ran.err
    content = json.loads(file.read_text("utf-8"))
    assert content["schema"] == "omni_grpc/bench-serve/1"
    assert (content["model"]["name"], content["server"]["device"]) == ("toy", "cpu")
    (point,) = content["points"]
    found = point["summary"]
    assert (found["requests"], found["succeeded"], found["attainment"]) == (6, 6, 1.0)
    assert found["latency"]["first_preview"]["count"] == 6
    steps = {"64x32:4": 4, "32x32:2": 2}
    for it in point["requests"]:
        assert len(it["gaps"]) == steps[it["klass"]] - 1
        assert it["scheduled"] <= it["sent"] <= it["first_event"] <= it["first_step"] <= it["ended"]
    assert set(found["classes"]) == set(steps)
    assert point["samples"][0]["cost_error"] is not None
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "end to end" in ran.out
    assert "6 of 6 requests succeeded" in ran.err


async def test_refused_requests_are_counted_by_reason_and_sent_again_where_told_to(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    async with serving(max_queue=1, max_num_seqs=1) as service:
        service.executor.gates[Lane.PREPARE].close()
        server = ("--server", f"127.0.0.1:{service.server.port}", "--warmup", 0, "--json", file)
        few = ("--rate", 100, "--requests", 5, "--timeout", 1.0)
        assert (await run("bench", "serve", *server, *few)).code == 0
        point = json.loads(file.read_text("utf-8"))["points"][0]
        # one is prepared, one waits, and the queue is full for the others
        assert point["summary"]["errors"] == {"RESOURCE_EXHAUSTED QUEUE_FULL": 3, "DEADLINE_EXCEEDED CALL_DEADLINE": 2}
        service.executor.gates[Lane.PREPARE].open()
        assert (await run("bench", "serve", *server, *few[:-1], 60.0, "--retries", 50)).code == 0
        summary = json.loads(file.read_text("utf-8"))["points"][0]["summary"]
        assert (summary["succeeded"], summary["errors"]) == (5, {})


async def test_a_closed_loop_holds_as_many_as_asked_for(run: Run, server: tuple[str, str], tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    ran = await run("bench", "serve", *server, "--concurrency", 3, "--requests", 9, "--json", file, "--quiet")
    assert ran.code == 0
    its = json.loads(file.read_text("utf-8"))["points"][0]["requests"]
    assert len(its) == 9
    # at the time that each was sent, at most two others had not ended
    assert max(sum(one["sent"] < it["sent"] < one["ended"] for one in its) for it in its) == 2
    assert ran.err == ""


async def test_several_rates_make_a_curve(run: Run, server: tuple[str, str], tmp_path: Path) -> None:
    picture = tmp_path / "a.png"
    ran = await run("bench", "serve", *server, "--rates", "50,100", "--requests", 4, "--plot", picture)
    assert ran.code == 0
    assert [line.split()[0] for line in ran.out.splitlines()] == ["RATE", "50/s", "100/s"]
    assert picture.read_bytes().startswith(b"\x89PNG")


async def test_a_target_that_is_not_reached_is_exit_code_1(run: Run, server: tuple[str, str]) -> None:
    ran = await run("bench", "serve", *server, *QUICK, "--slo", "e2e=1ms", "--target", 0.9)
    assert ran.code == 1
    assert "--target 0.9 was not reached: 0.0%" in ran.err


async def test_a_search_says_where_it_ended(run: Run, server: tuple[str, str]) -> None:
    ran = await run("bench", "serve", *server, "--saturate", 50, "--requests", 2, "--slo", "e2e=1ms", "--quiet")
    assert ran.code == 1
    assert "no rate that was tried keeps the objectives of 95%" in ran.out


async def test_a_request_that_takes_too_long_is_cancelled(
    run: Run, service: Service, server: tuple[str, str], tmp_path: Path
) -> None:
    service.executor.gates[Lane.STEP].close()
    file = tmp_path / "a.json"
    few = ("--requests", 2, "--rate", 100, "--warmup", 0, "--timeout", 0.3)
    ran = await run("bench", "serve", *server, *few, "--json", file)
    assert ran.code == 0
    point = json.loads(file.read_text("utf-8"))["points"][0]
    assert point["summary"]["errors"] == {"DEADLINE_EXCEEDED CALL_DEADLINE": 2}
    service.executor.gates[Lane.STEP].open()
    await asyncio.sleep(0)
    states = [(await service.get(it["job_id"])).state for it in point["requests"]]
    assert states == [event_pb2.JOB_STATE_CANCELLED] * 2


async def test_ctrl_c_gives_what_was_measured_until_then(
    service: Service, server: tuple[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "a.json"
    flags = (*server, "--rate", "20", "--arrivals", "constant", "--duration", "60", "--json", str(file))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "omni_grpc", "bench", "serve", *flags),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, cwd=ROOT, env=ENVIRONMENT,
    )  # fmt: skip

    await until(lambda: [job.state for job in service.engine.jobs.newest()].count(JobState.SUCCEEDED) >= 4)
    service.executor.gates[Lane.STEP].close()
    await until(lambda: JobState.RUNNING in [job.state for job in service.engine.jobs.newest()])
    process.send_signal(signal.SIGINT)
    written, _ = await process.communicate()
    assert process.returncode == 130
    assert b"Traceback" not in written
    assert b"interrupted" in written
    content = json.loads(file.read_text("utf-8"))
    outcomes = {it["outcome"] for it in content["points"][0]["requests"]}
    assert content["interrupted"]
    assert outcomes == {"succeeded", "interrupted"}
    assert {job.state for job in service.engine.jobs.newest()} == {JobState.SUCCEEDED, JobState.CANCELLED}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--saturate",), "--saturate needs --slo"),
        (("--bursts", "1/2"), "--bursts needs --arrivals bursts"),
        (("--speed", "2"), "--speed needs --trace"),
        (("--precision", "0.2"), "--precision needs --saturate"),
        (("--concurrency", "2", "--arrivals", "constant"), "--arrivals needs a rate"),
        (("--trace", "x.csv", "--duration", "3"), "--duration needs a rate or --concurrency"),
        (("--rate", "1", "--rates", "1,2"), "not allowed with argument --rate"),
        (("--rates", "1,1"), "has a rate twice"),
        (("--rate", "0"), "0 is not above 0"),
        (("--target", "1.5"), "is not above 0 and at most 1"),
        (("--kind", "video", "--mix-file", "x.yaml"), "--kind has no effect with --mix-file"),
        (("--slo", "e3e=2s"), "did you mean 'e2e'"),
    ],
)
async def test_flags_without_effect_are_refused_by_name(run: Run, flags: tuple[str, ...], said: str) -> None:
    ran = await run("bench", "serve", "--server", "127.0.0.1:1", *flags)
    assert ran.code == 2
    assert said in ran.err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--set", "stepz=3"), "all: stepz is no option of image; did you mean 'steps'"),
        (("--set", "steps=many"), "all: sampling.steps is 'many'"),
        (("--mix", "100x64:4"), "100x64:4: width 100 is not a multiple of 16"),
        (("--kind", "video"), "all: kind video is not what toy does"),
        (("--model", "other"), "MODEL_NOT_FOUND"),
        (("--rate", "0.01", "--duration", "1", "--warmup", "0"), "--duration is 1 s, in which no request comes"),
    ],
)
async def test_requests_that_cannot_be_sent_are_refused_before_any_work(
    run: Run, service: Service, server: tuple[str, str], flags: tuple[str, ...], said: str
) -> None:
    ran = await run("bench", "serve", *server, *flags)
    assert ran.code in (1, 2)
    assert said in ran.err
    assert service.engine.stats().queued == service.engine.stats().running == 0


async def test_a_plot_without_matplotlib_is_refused_with_the_way_to_get_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    ran = await run("bench", "serve", "--server", "127.0.0.1:1", "--plot", tmp_path / "a.png")
    assert ran.code == 2
    assert "pip install 'omni-grpc[plot]'" in ran.err
