"""`omni-grpc batch`: what it makes, what it refuses, and that it goes on where it stopped."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import PIL.Image
import pytest

from omni_grpc.client import Client
from omni_grpc.engine import JobState
from omni_grpc.engine.scheduler import Lane
from omni_grpc.metadata import parameters_in
from omni_grpc.types.errors import Code, Failure
from omni_grpc.types.media import ImageFormat
from tests.server.fake_executor import picture
from tests.server.service import serving, until
from tests.server.studio import png, serving_studio

pytestmark = pytest.mark.service

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "made"


@pytest.fixture
def file(tmp_path: Path):
    def write(*lines: Any, name: str = "batch.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
        return path

    return write


def records(folder: Path) -> list[dict[str, Any]]:
    head, *rest = map(json.loads, (folder / "results.jsonl").read_text().splitlines())
    assert head["omni_grpc_batch"] == 1
    return rest


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "results.jsonl")


def pixels(path: Path) -> bytes:
    return PIL.Image.open(path).tobytes()


async def test_every_line_is_made_with_its_parameters(run, server, service, file, folder):
    batch = file(
        {"prompt": "one", "seed": 7, "width": 48, "steps": 2},
        "",
        {"prompt": "two", "seeds": [5, 9], "num_outputs": 2, "output_format": "webp", "labels": {"a": "b"}},
    )
    done = await run("batch", batch, "--output-dir", folder, *server, "--set", "steps=3")
    assert done.code == 0, done.err
    assert names(folder) == ["00001-7.png", "00003-5.webp", "00003-9.webp"]
    assert done.err.splitlines()[-1] == f"2 made, 0 failed: {folder / 'results.jsonl'}"
    assert f"{folder / '00001-7.png'}  line 1  seed 7" in done.out.splitlines()
    found = parameters_in(folder / "00003-9.webp")
    assert (found.asked.prompt, found.seed, found.effective["steps"]) == ("two", 9, 3)
    assert parameters_in(folder / "00001-7.png").effective["steps"] == 2
    assert {record["line"]: record["files"] for record in records(folder)} == {
        1: ["00001-7.png"], 3: ["00003-5.webp", "00003-9.webp"],
    }  # fmt: skip
    before = len(service.engine.jobs)
    again = await run("batch", batch, "--output-dir", folder, *server, "--set", "steps=3")
    assert (again.code, again.out, len(service.engine.jobs)) == (0, "", before)
    assert "0 made, 2 made before, 0 failed" in again.err
    (folder / "00001-7.png").unlink()
    assert (await run("batch", batch, "--output-dir", folder, *server, "--set", "steps=3", "--no-metadata")).code == 0
    assert (folder / "00001-7.png").read_bytes() == picture(48, 32, 7, ImageFormat.PNG)
    assert len(service.engine.jobs) == before, "the server knows the request again"


async def test_prompts_as_plain_lines_and_from_stdin(run, server, service, file, tmp_path, monkeypatch):
    text = "a red circle\n\n{not json}\n"
    for number, (source, more) in enumerate(
        [(file(text, name="a.txt"), ()), (file(text), ("--text",)), ("-", ("--text",))]
    ):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        done = await run("batch", source, "--output-dir", tmp_path / str(number), *server, "--json", *more)
        assert done.code == 0, done.err
        assert sorted(json.loads(line)["prompt"] for line in done.out.splitlines()) == ["a red circle", "{not json}"]
    assert names(tmp_path / "0") == names(tmp_path / "1") == names(tmp_path / "2")
    assert len(service.engine.jobs) == 2, "the same lines are the same requests, and their seeds are drawn alike"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "line 2: is not JSON ("),
        ("[1]", "line 2: is [1], expected a JSON object"),
        ({"prompt": "x", "widht": 3}, "line 2: widht: is no option of image; did you mean 'width'?"),
        ({"steps": 3}, "line 2: prompt: is missing, expected text"),
        ({"prompt": 3}, "line 2: prompt: is 3, expected text"),
        ({"prompt": " "}, "line 2: prompt: is empty; describe what to generate"),
        ({"prompt": "x", "steps": "3"}, "line 2: steps: is '3', expected an integer from 0 to"),
        ({"prompt": "x", "steps": 0}, "line 2: steps: 0 is outside 1..200"),
        ({"prompt": "x", "seed": 1, "seeds": [1]}, "line 2: seed, seeds: are both set; set only one of them"),
        ({"prompt": "x", "width": 20}, "line 2: width: 20 is not a multiple of 16; nearest valid value: 16"),
        ({"prompt": "x", "height": 99999}, "line 2: height: 99999 is outside 16..4096"),
        ({"prompt": "x", "width": 4096, "height": 4096}, "line 2: width, height: 4096 x 4096 is more than"),
        ({"prompt": "x", "scheduler": "Euler"}, "line 2: scheduler: toy has no 'Euler'; it has ToyScheduler"),
        ({"prompt": "x", "seed": 2**53}, "line 2: seed: 9007199254740992 is outside 0..9007199254740991"),
        ({"prompt": "x", "request_id": "mine"}, "line 2: request_id: is no option of image"),
        ({"prompt": "x", "kind": "film"}, "line 2: kind: is 'film', expected one of image, edit, video, audio"),
        ({"prompt": "x", "kind": "audio"}, "line 2: kind: audio is not what toy does; it does TEXT_TO_IMAGE"),
        ({"prompt": "x", "kind": "edit"}, "line 2: images: is missing, expected a list of files to edit"),
        ({"prompt": "x", "kind": "edit", "images": "a.png"}, "line 2: images: is 'a.png', expected a list of paths"),
        ({"prompt": "x", "kind": "edit", "images": ["no.png"]}, "line 2: images: no.png: there is no such file"),
    ],
)
async def test_a_bad_line_is_refused_before_any_work(run, server, service, file, folder, line, told):
    done = await run("batch", file({"prompt": "good"}, line), "--output-dir", folder, *server)
    assert (done.code, len(service.engine.jobs), folder.exists()) == (2, 0, False)
    first, second = done.err.splitlines()[:2]
    assert first.endswith("batch.jsonl: 1 of its lines is wrong, and nothing was begun")
    assert second.strip().startswith(told)


async def test_all_bad_lines_are_told_at_once(run, server, file, folder):
    done = await run("batch", file({"prompt": "x", "stepz": 1, "seed": "a"}, "{", {"prompt": ""}),
                     "--output-dir", folder, *server)  # fmt: skip
    assert "3 of its lines are wrong" in done.err
    assert [line.split(": ")[0].strip() for line in done.err.splitlines()[1:]] == [
        "line 1",
        "line 1",
        "line 2",
        "line 3",
    ]
    assert (await run("batch", file(""), "--output-dir", folder, *server)).code == 2
    (folder.parent / "latin.txt").write_bytes(b"caf\xe9")
    latin = await run("batch", folder.parent / "latin.txt", "--output-dir", folder, *server)
    assert (latin.code, "is not text in UTF-8" in latin.err) == (2, True)


async def test_a_folder_with_other_files_is_refused(run, server, service, file, folder):
    folder.mkdir()
    (folder / "00001-3.png").write_text("of someone else")
    done = await run("batch", file({"prompt": "x"}), "--output-dir", folder, *server)
    assert (done.code, "has 1 files of other work (00001-3.png)" in done.err) == (2, True)
    assert (names(folder), len(service.engine.jobs)) == (["00001-3.png"], 0)
    assert not (folder / "results.jsonl").exists()
    (folder / "results.jsonl").write_text("{}\n")
    done = await run("batch", file({"prompt": "x"}), "--output-dir", folder, *server)
    assert (done.code, "is not of a batch of this version" in done.err) == (2, True), done.err


async def test_a_line_that_changed_is_refused_and_one_that_was_added_is_made(run, server, service, file, folder):
    assert (await run("batch", file({"prompt": "x", "seed": 1}), "--output-dir", folder, *server)).code == 0
    done = await run("batch", file({"prompt": "y", "seed": 1}), "--output-dir", folder, *server)
    assert (done.code, "line 1: was made of another request: 00001-1.png" in done.err) == (2, True)
    more = file({"prompt": "x", "seed": 1}, {"prompt": "y", "seed": 2})
    assert (await run("batch", more, "--output-dir", folder, *server)).code == 0
    assert (names(folder), len(service.engine.jobs)) == (["00001-1.png", "00002-2.png"], 2)


async def test_a_line_that_fails_stops_no_other_and_is_tried_again_the_next_time(run, server, service, file, folder):
    service.executor.failures[Lane.STEP] = Failure(code=Code.INTERNAL, reason="BROKE", message="it broke")
    batch = file({"prompt": "x", "seed": 1}, {"prompt": "y", "seed": 2})
    done = await run("batch", batch, "--output-dir", folder, *server, "--concurrency", 1)
    assert done.code == 1
    assert "line 1: error: INTERNAL BROKE: it broke" in done.err
    assert done.err.splitlines()[-1].startswith("1 made, 1 failed: ")
    assert names(folder) == ["00002-2.png"]
    assert [record.get("error", {}).get("reason") for record in records(folder)] == ["BROKE", None]
    again = await run("batch", batch, "--output-dir", folder, *server, "--concurrency", 1)
    assert (again.code, names(folder)) == (0, ["00001-1.png", "00002-2.png"])


async def test_a_failure_that_may_pass_is_met_with_another_try(run, server, service, file, folder):
    failure = Failure(code=Code.RESOURCE_EXHAUSTED, reason="OUT_OF_MEMORY", message="no room", retry_after=0.01)
    service.executor.failures[Lane.STEP] = failure
    done = await run("batch", file({"prompt": "x", "seed": 1}), "--output-dir", folder, *server)
    assert (done.code, names(folder), len(service.engine.jobs)) == (0, ["00001-1.png"], 2)


async def test_a_server_that_is_not_there_ends_all(run, server, file, folder):
    done = await run("batch", file({"prompt": "x"}), "--output-dir", folder, "--server", "127.0.0.1:1")
    assert (done.code, "SERVER_UNREACHABLE" in done.err) == (1, True)
    other = await run("batch", file({"prompt": "x"}), "--output-dir", folder, *server, "--model", "other")
    assert (other.code, "this server has toy" in other.err) == (1, True)


async def test_no_more_requests_at_a_time_than_asked_for(run, server, service, file, folder):
    service.executor.gates[Lane.STEP].close()
    batch = file(*({"prompt": "x", "seed": i} for i in range(5)))
    running = asyncio.create_task(run("batch", batch, "--output-dir", folder, *server, "--concurrency", 2))
    await until(lambda: len(service.engine.jobs) == 2)
    await asyncio.sleep(0.2)
    assert len(service.engine.jobs) == 2
    service.executor.gates[Lane.STEP].open()
    assert (await running).code == 0
    assert len(names(folder)) == 5


async def test_every_kind_and_media_by_their_paths(run, file, folder, tmp_path):
    (tmp_path / "a.png").write_bytes(png())
    batch = file(
        {"kind": "edit", "prompt": "blue", "images": [str(tmp_path / "a.png")], "seed": 1, "strength": 0.5},
        {"kind": "video", "prompt": "a ball", "first_frame": str(tmp_path / "a.png"), "num_frames": 5, "seed": 2},
        {"kind": "audio", "prompt": "rain", "seed": 3, "output_format": "flac"},
    )
    async with serving_studio() as service:
        address = ("--server", f"127.0.0.1:{service.server.port}")
        done = await run("batch", batch, "--output-dir", folder, *address)
        assert done.code == 0, done.err
        assert names(folder) == ["00001-1.png", "00002-2.mp4", "00003-3.flac"]
        assert "warning: line 2: output 0 is written without its parameters" in done.err  # its videos are noise
        (tmp_path / "a.png").write_bytes(png(seed=1))
        changed = await run("batch", batch, "--output-dir", folder, *address)
        assert (changed.code, "line 1: was made of another request" in changed.err) == (2, True)


async def test_media_that_vanish_fail_their_line_alone(run, file, folder, tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.png").write_bytes(png())
    edit = {"kind": "edit", "prompt": "blue"}
    batch = file(*(edit | {"images": [str(tmp_path / f"{name}.png")], "seed": 1} for name in ("a", "b", "c")))
    async with serving_studio() as service:
        service.executor.gates[Lane.STEP].close()
        address = ("--server", f"127.0.0.1:{service.server.port}", "--concurrency", 1)
        running = asyncio.create_task(run("batch", batch, "--output-dir", folder, *address))
        await until(lambda: len(service.engine.jobs) == 1)
        (tmp_path / "b.png").unlink()
        service.executor.gates[Lane.STEP].open()
        done = await running
    assert (done.code, names(folder)) == (1, ["00001-1.png", "00003-1.png"])
    assert f"line 2: error: FAILED_PRECONDITION FILE_NOT_READ: {tmp_path / 'b.png'}: there is no such file" in done.err


async def test_media_that_are_uploaded_are_known_again(run, file, folder, tmp_path, monkeypatch):
    monkeypatch.setattr("omni_grpc.client.media.INLINE_BYTES", 10)
    (tmp_path / "a.png").write_bytes(png())
    batch = file({"kind": "edit", "prompt": "blue", "images": [str(tmp_path / "a.png")], "seed": 1})
    async with serving_studio() as studio:
        address = ("--server", f"127.0.0.1:{studio.server.port}")
        assert (await run("batch", batch, "--output-dir", folder, *address)).code == 0
        first = (folder / "00001-1.png").read_bytes()
        (folder / "00001-1.png").unlink()
        done = await run("batch", batch, "--output-dir", folder, *address)
        assert (done.code, len(studio.engine.jobs)) == (0, 1)
    assert (folder / "00001-1.png").read_bytes() == first


async def test_a_terminal_shows_a_bar_and_results_stay_on_stdout(run, server, file, folder, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    batch = file({"prompt": "x", "seed": 1}, {"prompt": "y", "seed": 2})
    done = await run("batch", batch, "--output-dir", folder, *server)
    assert done.code == 0
    assert "2/2" in terminal.getvalue()
    assert "0 failed" in terminal.getvalue()
    assert sorted(line.split("  ")[1] for line in done.out.splitlines()) == ["line 1", "line 2"]


# --- interrupts -------------------------------------------------------------------------------------------------------


async def begun(batch: Path, folder: Path, server: tuple[str, str], made: int) -> asyncio.subprocess.Process:
    """A batch in a process of its own, once it has printed that many results."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "omni_grpc", "batch", str(batch), "--output-dir", str(folder), *server,
        "--concurrency", "2", "--quiet", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        cwd=ROOT, env=ENVIRONMENT,
    )  # fmt: skip
    assert process.stdout is not None
    for _ in range(made):
        assert await process.stdout.readline()
    return process


async def test_a_batch_that_is_killed_goes_on_where_it_stopped(run, server, service, file, folder):
    batch = file(*({"prompt": f"number {i}", "steps": 1} for i in range(6)))
    steps = service.executor.gates[Lane.STEP]
    steps.close()
    starting = asyncio.create_task(begun(batch, folder, server, made=3))
    made = 0

    def succeeded() -> int:
        return sum(job.state is JobState.SUCCEEDED for job in service.engine.jobs.newest())

    while made < 3:  # both that run may share a step
        steps.let(1)
        await until(lambda made=made: succeeded() > made)
        made = succeeded()
    process = await starting
    await until(lambda: len(service.engine.jobs) >= 5)
    process.kill()
    await process.communicate()
    written = (folder / "results.jsonl").read_bytes()
    made = len(records(folder))
    assert 3 <= made < 6
    # what a kill in the middle of a write leaves, and a file whose line was not written any more
    (folder / "results.jsonl").write_bytes(written[:-7])
    steps.open()
    done = await run("batch", batch, "--output-dir", folder, *server)
    assert done.code == 0, done.err
    assert f"{made - 1} made before" in done.err
    assert len(names(folder)) == 6
    assert len(service.engine.jobs) == 6, "nothing was made twice"
    assert sorted(record["line"] for record in records(folder)) == [1, 2, 3, 4, 5, 6]
    for record in records(folder):
        (name,) = record["files"]
        assert (
            pixels(folder / name)
            == PIL.Image.open(io.BytesIO(picture(64, 32, record["seeds"][0], ImageFormat.PNG))).tobytes()
        )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_cancels_what_runs_and_the_next_run_makes_it(run, server, service, file, folder, number):
    batch = file(*({"prompt": f"number {i}", "seed": i} for i in range(3)))
    steps = service.executor.gates[Lane.STEP]
    steps.close()
    process = await begun(batch, folder, server, made=0)
    await until(lambda: len([job for job in service.engine.jobs.newest() if job.state is JobState.RUNNING]) == 2)
    await asyncio.sleep(0.1)  # until the client has seen that
    process.send_signal(number)
    _, told = await process.communicate()
    assert process.returncode == 128 + number, told
    assert b"Traceback" not in told
    assert [job.state for job in service.engine.jobs.newest()] == [JobState.CANCELLED] * 2
    assert names(folder) == []
    steps.open()
    done = await run("batch", batch, "--output-dir", folder, *server)
    assert done.code == 0, done.err
    assert names(folder) == ["00001-0.png", "00002-1.png", "00003-2.png"]


async def test_two_batches_do_not_share_a_folder(run, server, service, file, folder):
    service.executor.gates[Lane.STEP].close()
    batch = file({"prompt": "x"})
    first = asyncio.create_task(run("batch", batch, "--output-dir", folder, *server))
    await until(lambda: len(service.engine.jobs) == 1)
    second = await run("batch", batch, "--output-dir", folder, *server)
    assert (second.code, "another batch is at work" in second.err) == (1, True)
    service.executor.gates[Lane.STEP].open()
    assert (await first).code == 0


async def test_an_operator_who_cancels_a_job_is_obeyed(run, file, folder):
    async with serving() as service:
        service.executor.gates[Lane.STEP].close()
        address = f"127.0.0.1:{service.server.port}"
        running = asyncio.create_task(run("batch", file({"prompt": "x"}), "--output-dir", folder, "--server", address))
        await until(lambda: any(job.state is JobState.RUNNING for job in service.engine.jobs.newest()))
        (job,) = service.engine.jobs.newest()
        with Client(address) as client:
            await asyncio.to_thread(client.cancel_job, job.id)
        done = await running
    assert (done.code, "error: CANCELLED JOB_CANCELLED" in done.err, len(service.engine.jobs)) == (1, True, 1)
