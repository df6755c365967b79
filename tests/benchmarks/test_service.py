"""The service benchmarks run, with numbers far too small to measure anything. No assertion is about speed."""

import dataclasses
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import provenance
from benchmarks.service import (
    __main__,
    auth,
    cancel,
    crowd,
    endure,
    fairness,
    inputs,
    kills,
    lanes,
    overhead,
    preempt,
    rank_loss,
    recovery,
    resume,
    saturation,
    slow_watcher,
    soak,
    store,
    telemetry_cost,
    throughput,
    trace_cost,
    watchers,
)
from benchmarks.service.arrivals import Arrival, in_order
from benchmarks.service.report import Result, load, spread, write
from benchmarks.service.server import Server, served, server_environment
from omni_grpc.cli.bench.figures import quantile
from omni_grpc.config import BUNDLED
from tests.store.postgres import Postgres, new_database
from tests.store.postgres import postgres as postgres

pytestmark = pytest.mark.service

ENDLESS = 10_000
"""Steps of a job that never has to end: many seconds on any machine."""


@pytest.fixture(scope="module")
def server(tiny_qwen_image: Path) -> Iterator[Server]:
    """One for all: a server takes seconds to start."""
    with served(
        tiny_qwen_image,
        *("--warm-up-seconds", "0", "--restart-backoff", "0", "--max-prompt-chars", "3000000"),
        *("--max-steps", str(ENDLESS), *preempt.FLAGS),
    ) as server:
        yield server


def check(result: Result) -> Result:
    """What holds for every benchmark: no promise was broken, and there is a table."""
    assert not result.problems
    assert result.rows
    assert {len(row) for row in result.rows} == {len(result.columns)}
    json.dumps(result.figures)
    return result


def test_throughput_compares_every_image(server: Server) -> None:
    figures = check(throughput.measure(server, server, throughput.Numbers(jobs=3, repeats=1, most_steps=2))).figures
    assert (figures["jobs"], figures["steps"], figures["images_compared"]) == (3, 6, 3)
    assert figures["largest_difference_of_255"] == 0


def test_watchers_counts_every_event(server: Server) -> None:
    steps = 500
    numbers = watchers.Numbers(jobs=2, watchers=4, loads={"tiny": (64, steps)})
    loads = check(watchers.measure(server, numbers)).figures["loads"]
    for figures in loads.values():
        # queued, started, encode_done, decode_progress, artifact_ready, completed
        assert figures["state_events_received"] == figures["state_events_expected"] == 4 * 6
        assert figures["step_events"] + figures["step_events_left_out"] == 4 * steps
        assert figures["events"] == 4 * 6 + figures["step_events"]
    assert loads["tiny, 64 x 64"]["lag_samples"] > 0
    assert loads["replay"]["step_events"] == 4 * steps


def test_crowd_counts_every_event_and_every_connection(server: Server) -> None:
    numbers = crowd.Numbers(jobs=2, watchers=6, connections=2, size=64, steps=500, idle=20, calls=5)
    figures = check(crowd.measure(server, numbers)).figures
    found, idle = figures["crowd"], figures["idle"]
    assert found["state_events_received"] == found["state_events_expected"] == 6 * 6
    assert found["step_events"] + found["step_events_left_out"] == 6 * 500
    assert found["lag_p99_ms"] >= found["lag_p50_ms"] > 0
    assert found["rss_most_mb"] >= found["rss_before_mb"] > 10
    assert idle["open_at_the_end"] == 20


def test_saturation_measures_the_bundled_model_and_draws_it(tmp_path: Path) -> None:
    short = {"seconds": 0.5, "search_seconds": 0.5, "precision": 1.0, "first": 8.0, "slo": "e2e=60s"}
    numbers = saturation.Numbers(rates=(8, 16), flags={saturation.PLAIN: ()}, mixes=("64x64:2",), **short)
    figures = check(saturation.measure(BUNDLED, numbers)).figures
    assert [point["rate"] for point in figures["curves"][saturation.PLAIN]] == [8, 16]
    for point in figures["curves"][saturation.PLAIN]:
        assert point["summary"]["attainment"] == 1.0
        assert set(point["summary"]["classes"]) <= {"128x128:20", "256x256:20"}
        assert point["server"]["cost_error_median"] > 0
    assert figures["highest"]["64x64:2"]["rate"] >= 1
    record, picture = tmp_path / "record.json", tmp_path / "curve.png"
    record.write_text(json.dumps({"figures": figures, "machine": {"cores": 2}}), "utf-8")
    saturation.draw(record, picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_slow_watcher_counts_what_it_missed(server: Server) -> None:
    numbers = slow_watcher.Numbers(rounds=1, size=64, steps=300, pause=0.5)
    figures = check(slow_watcher.measure(server, numbers)).figures
    (received,), (coalesced,) = figures["slow_steps_received"], figures["slow_steps_coalesced"]
    assert received + coalesced == 300
    assert coalesced > 0
    assert figures["bytes_per_step_event"] > 10_000


async def test_telemetry_cost_times_each_kind_of_event() -> None:
    found = await telemetry_cost.measure(telemetry_cost.Numbers(rounds=2, running=2, steps=3, times=100))
    check(found)
    assert len(found.figures["event_us"]) == 5
    assert min(found.figures["event_us"].values()) > 0
    assert len(found.figures["loop_us"]["on"]) == len(found.figures["loop_us"]["off"]) == 2


def test_overhead_times_every_part(server: Server, tiny_qwen_image: Path) -> None:
    numbers = overhead.Numbers(size=32, steps=30, running=(2,))
    together = {2: overhead.in_process(tiny_qwen_image, numbers, 2)}
    # this server has one place, so that its jobs never share a step
    alone = overhead.serve(server, numbers, 1)
    check(overhead.result(numbers, together, {2: alone}))
    assert together[2].keys() == {"wall", "predict", *overhead.PARTS}
    assert all(value > 0 for value in together[2].values())
    assert 0 < alone["step"] < alone["wall"]


def test_lanes_sees_steps_beside_both(server: Server) -> None:
    # long enough that the running job is still there when the others come, where something else wants the cores
    decode = dataclasses.replace(lanes.Numbers().others["a decode"], size=768)
    encode = dataclasses.replace(lanes.Numbers().others["the longest encode"], count=1)
    numbers = lanes.Numbers(rounds=1, size=64, steps=1500, others={"an encode": encode, "a decode": decode})
    figures = check(lanes.measure(server, numbers)).figures
    assert list(figures) == ["nothing", "an encode", "a decode"]
    assert all(found["steps"] > 0 for found in figures.values())


def test_cancel_finds_each_phase(server: Server) -> None:
    sizes = {"queue": 64, "encode": 64, "step": 512, "decode": 768}
    # cancelled at the event that begins the phase, since a quick machine may be through with it in no time
    cases = {
        phase: dataclasses.replace(case, options={**case.options, "width": size, "height": size}, after=0.0)
        for (phase, case), size in zip(cancel.CASES.items(), sizes.values(), strict=True)
    }
    # the first event takes its time to the reader where others want the cores, and the phase has to outlast that
    cases["encode"] = dataclasses.replace(cases["encode"], prompt_repeats=200_000)
    figures = check(cancel.measure(server, cancel.Numbers(repeats=1, cases=cases))).figures
    assert list(figures) == ["queue", "encode", "step", "decode"]
    assert [phase["step_events_after_reply"] for phase in figures.values()] == [0, 0, 0, 0]


def test_auth_asks_as_every_kind_of_caller(tiny_qwen_image: Path) -> None:
    figures = check(auth.measure(tiny_qwen_image, auth.Numbers(calls=4, turn=3, settle=1))).figures["milliseconds"]
    assert list(figures) == ["GetServerInfo", "GetJob"]
    for callers in figures.values():
        assert len(callers) == 6
        assert all(0 < found["p50"] <= found["p99"] for found in callers.values())


def test_preempt_sees_both_events(server: Server) -> None:
    numbers = preempt.Numbers(rounds=1, size=64, low_steps=1500, high_steps=2, lead=1)
    (it,) = check(preempt.measure(server, numbers)).figures["rounds"]
    assert it["same_image"]
    assert it["events"] == ("preempted", "resumed")
    assert 1 <= it["completed_before"] < 1500


def test_resume_misses_nothing(server: Server) -> None:
    # steps that take their time, since a client that falls 8 of them behind is not sent them all
    figures = check(resume.measure(server, resume.Numbers(rounds=1, size=256, steps=60, kill_after=3))).figures
    assert (figures["state_events"], figures["state_events_missing"], figures["step_events_missing"]) == (6, 0, 0)
    assert figures["events_before_kill"][0] + figures["events_after_resume"][0] <= 66


def test_every_job_ends_when_the_worker_is_killed_in_the_middle_of_a_report(tiny_qwen_image: Path) -> None:
    check(kills.measure(tiny_qwen_image, kills.Numbers(kills=20)))


def test_recovery_loses_the_running_jobs_alone(server: Server) -> None:
    numbers = recovery.Numbers(jobs=1, rounds=1, steps=ENDLESS, size=128)
    (kill,) = check(recovery.measure(server, numbers)).figures["kills"]
    assert kill["codes"] == ("UNAVAILABLE (retryable)",)
    assert kill["at_once"]["outcome"] == "completed"
    assert kill["after_failure"]["outcome"] == "completed"
    assert kill["after_failure"]["first_step"] > kill["after_failure"]["created"]


def test_rank_loss_times_the_loss_of_each_rank(tiny_qwen_image: Path) -> None:
    numbers = rank_loss.Numbers(rounds=1, signals=(signal.SIGKILL,))
    losses = check(rank_loss.measured(tiny_qwen_image, numbers)).figures["losses"]
    assert [(loss["rank"], loss["reason"], loss["next_outcome"]) for loss in losses] == [
        (0, "WORKER_DIED", "completed"),
        (1, "WORKER_DIED", "completed"),
    ]
    assert all(0 < loss["failed"] < loss["next_step"] <= loss["next_finished"] for loss in losses)


# --- the report -------------------------------------------------------------------------------------------------------


def test_a_results_file_says_where_it_comes_from(tmp_path: Path) -> None:
    result = Result(columns=("a", "b"), rows=[("1", "2")], figures={"x": [1 / 3]}, problems=["no"])
    with load() as meanwhile:
        pass
    content = json.loads(write(tmp_path, "sample", result, meanwhile).read_text())
    assert content["script"] == "python -m benchmarks.service sample"
    assert {*provenance.KEYS, "load", "memory_gb"} <= content.keys()
    assert content["packages"].keys() >= {"torch", "grpcio", "protobuf"}
    assert content["machine"].keys() >= {"cores", "cpu"}
    assert (content["figures"], content["problems"]) == ({"x": [0.333333]}, ["no"])
    assert result.table() == "| a | b |\n| --- | --- |\n| 1 | 2 |"


def test_quantiles_are_values_that_occurred() -> None:
    assert [quantile([3.0, 1.0, 2.0], q) for q in (0.0, 0.5, 0.99)] == [1.0, 2.0, 3.0]
    assert quantile(list(range(1, 101)), 0.99) == 99
    assert spread([3.0, 1.0, 2.0], "s") == "2.0 (1.0 to 3.0) s"


def test_order_means_once_and_after_what_came_before() -> None:
    def arrivals(*seqs: int) -> list[Arrival]:
        return [Arrival(seq, "step_progress", 0.0, 0.0, 0, 0) for seq in seqs]

    assert in_order(arrivals(1, 2, 5))
    assert not in_order(arrivals(1, 1))
    assert not in_order(arrivals(2, 1))


def test_an_unknown_name_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["service", "trhoughput"])
    with pytest.raises(SystemExit) as caught:
        __main__.main()
    assert caught.value.code == 2
    assert "no benchmark is called trhoughput" in capsys.readouterr().err


def test_inputs_counts_every_byte_that_arrives(tiny_qwen_image: Path) -> None:
    figures = check(inputs.measure(tiny_qwen_image, inputs.Numbers(frames=3, width=64, height=48))).figures
    assert figures["decoded_bytes"] == 3 * 64 * 48 * 3
    assert list(figures["stalls"]) == ["nothing", "decode", "hand over to the worker", "free"]


def test_soak_looks_at_the_memory_of_worker_and_server(server: Server) -> None:
    numbers = soak.Numbers(jobs=4, every=2, smallest=16, largest=48)
    looks = soak.measure(server, numbers).figures["looks"]
    assert [look["jobs"] for look in looks] == [2, 4]
    assert all(look["worker"] > look["server"] > 1 for look in looks)


def test_fairness_has_figures_of_both_jobs(server: Server) -> None:
    numbers = fairness.Numbers(repeats=1, small=(64, 64), big=(128, 128), small_steps=1, big_steps=4)
    figures = fairness.measure(server, numbers).figures
    assert len(figures["small_beside"]) == 1
    assert len(figures["small_stream"]) >= 1
    assert min(figures[name] for name in ("small_alone", "big_step", "big_beside_one", "big_share_beside_stream")) > 0


def test_endure_kills_a_worker_and_finds_everything_back(server: Server) -> None:
    numbers = endure.Numbers(seconds=4.0, clients=2, kill_every=2.0, look_every=1.5, settle=1.0)
    figures = check(endure.measure(server, numbers)).figures
    assert sum(figures["ends"].values()) > 2
    assert [look["kills"] for look in figures["looks"]][-1] >= 1


def test_the_store_is_measured_on_both_databases(postgres: Postgres) -> None:
    url = new_database(postgres)
    result = check(store.measure(store.Numbers(jobs=40, pages=2, opens=1, seconds=0.05, state_url=url)))
    assert result.figures["databases"].keys() == {"SQLite", "PostgreSQL"}
    for figures in result.figures["databases"].values():
        assert figures["page_ms"]["no filter, one tenant"]["jobs"] > 0
        assert figures["writes"][64]["jobs_per_second"] > 0
    with pytest.raises(SystemExit, match="has jobs already"):
        store.measure(store.Numbers(jobs=40, state_url=url))


def test_traces_and_logs_are_measured_apart() -> None:
    numbers = trace_cost.Numbers(jobs=2, steps=(2, 4), at_once=2, rounds=1, loops=5)
    found = check(trace_cost.measure(numbers))
    assert set(found.figures["ways"]) == {
        "off",
        "traces, sampled",
        "traces, not sampled",
        "logs as text",
        "logs as JSON",
    }
    parts = dict(found.figures["parts_us"])
    # a difference of two measured times, which in so short a run may be below zero
    step = parts.pop("thread, step")
    few, many = (parts[f"thread, job of {steps} steps"] for steps in numbers.steps)
    assert step == pytest.approx((many - few) / (numbers.steps[1] - numbers.steps[0]))
    assert len(parts) == 6
    assert all(took > 0 for took in parts.values())


def test_a_server_starts_where_the_commit_of_a_record_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(provenance.COMMIT, "0123456789ab")
    assert provenance.COMMIT not in server_environment()
    assert server_environment()["PATH"]
