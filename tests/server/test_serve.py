"""`python -m omni_grpc.serve` as its users run it: a process of its own, a real worker, real clients."""

import hashlib
import io
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import PIL.Image
import psutil
import pytest

from omni_grpc.client.channel import DIRECT
from omni_grpc.v1 import artifact_pb2, artifact_pb2_grpc, job_pb2, job_pb2_grpc

from .process import LONG, ROOT, Process, data_of, served
from .service import kinds

pytestmark = pytest.mark.service

BUF = Path(sys.executable).with_name("buf")


@pytest.fixture(scope="module")
def server(tiny_qwen_image: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    with served(tiny_qwen_image, tmp_path_factory.mktemp("serve"), "--warm-up-seconds", "1") as running:
        yield running
        code, rest = running.stop()
        assert (code, rest) == (0, ""), running.log.read_text()


def test_a_generation_comes_step_by_step_and_is_the_same_again(server):
    events = server.generate()
    assert kinds(events) == [
        "queued", "started", "encode_done", *["step_progress"] * 4, "decode_progress", "artifact_ready",
        "artifact_chunk", "completed",
    ]  # fmt: skip
    picture = PIL.Image.open(io.BytesIO(data_of(events)))
    assert (picture.format, picture.size) == ("PNG", (64, 64))
    assert events[-1].completed.effective.guidance.true_cfg_scale > 1
    assert data_of(server.generate()) == data_of(events), "the same seed"
    assert data_of(server.generate(seed=8)) != data_of(events)


def test_the_log_says_that_a_restart_loses_jobs_before_any_is_lost(server):
    before, _, _ = server.log.read_text().partition("listening on ")
    assert "jobs are kept in memory: a restart loses them (--state-dir keeps them)" in before


def test_a_second_client_can_watch_resume_and_download(server):
    call = server.generation.GenerateImage(server.image())
    events = [message.event for message in call]
    job_id, last = events[0].job_id, events[-1].seq
    with grpc.insecure_channel(server.address, options=DIRECT) as channel:
        watch = job_pb2_grpc.JobServiceStub(channel).WatchJob
        seen = [message.event for message in watch(job_pb2.WatchJobRequest(job_id=job_id, after_seq=4))]
        assert [event.seq for event in seen] == list(range(5, last + 1))
        artifact = seen[-1].completed.artifacts[0]
        request = artifact_pb2.DownloadArtifactRequest(artifact_id=artifact.artifact_id, offset=100)
        first, *rest = artifact_pb2_grpc.ArtifactServiceStub(channel).DownloadArtifact(request)
    assert first.metadata == artifact
    assert b"".join(message.chunk.data for message in rest) == data_of(events)[100:]
    assert hashlib.sha256(data_of(events)).digest() == artifact.sha256


def test_a_job_is_cancelled_between_two_steps(server):
    call = server.generation.GenerateImage(server.image(**LONG))
    events = []
    with pytest.raises(grpc.RpcError) as caught:  # noqa: PT012 (the call ends inside of the loop)
        for message in call:
            events.append(message.event)
            if message.event.WhichOneof("event") == "step_progress" and message.event.step_progress.step == 2:
                server.jobs.CancelJob(job_pb2.CancelJobRequest(job_id=message.event.job_id))
    assert caught.value.code() is grpc.StatusCode.CANCELLED
    assert 2 <= events[-1].cancelled.completed_steps < 200
    assert kinds(server.generate())[-1] == "completed"


def test_health_is_told_by_name(server):
    assert [server.health(name) for name in ("", "liveness", "omni_grpc.v1.GenerationService")] == [1, 1, 1]


def test_the_towers_stay_apart(server):
    def loaded(pid: int, library: str) -> bool:
        return any(library in Path(entry.path).name for entry in psutil.Process(pid).memory_maps())

    worker = server.worker().pid
    assert loaded(worker, "libtorch")
    assert not loaded(worker, "cygrpc")
    assert loaded(server.popen.pid, "cygrpc")
    assert not loaded(server.popen.pid, "libtorch")


def buf(server: Process, *arguments: str) -> str:
    command = [str(BUF), "curl", "--protocol", "grpc", "--http2-prior-knowledge", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120, cwd=ROOT).stdout


def test_buf_curl_can_explore_and_call_it_by_reflection_alone(server):
    listed = buf(server, "--list-services", f"http://{server.address}").split()
    assert {"omni_grpc.v1.GenerationService", "omni_grpc.v1.JobService", "grpc.health.v1.Health"} <= set(listed)
    body = {"model": server.model, "prompt": "a star", "width": 32, "height": 32, "sampling": {"steps": 2, "seed": 0}}
    url = f"http://{server.address}/omni_grpc.v1.GenerationService/GenerateImage"
    text, decoder, messages = buf(server, "--data", json.dumps(body), url), json.JSONDecoder(), []
    while text := text.lstrip():
        message, end = decoder.raw_decode(text)
        messages.append(message["event"])
        text = text[end:]
    assert [int(message.get("seq", 0)) for message in messages] == [1, 2, 3, 4, 5, 6, 7, 0, 8]
    assert messages[-1]["completed"]["effective"]["seeds"] == ["0"]


def test_a_second_server_on_the_port_says_so_and_leaves_the_first_alone(server, tiny_qwen_image):
    port = server.address.rpartition(":")[2]
    code, stderr = failing("--model", str(tiny_qwen_image), "--port", port)
    assert code == 2
    assert f"error: cannot listen on 127.0.0.1:{port}: the port is in use by another program" in stderr
    assert server.health() == 1


# --- what does not start ----------------------------------------------------------------------------------------------


def failing(*arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "omni_grpc.serve", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_bad_settings_and_bad_checkpoints_are_told_in_one_line(tiny_qwen_image, tmp_path):
    assert failing("--model", "m", "--prot", "1") == (2, "error: unknown argument '--prot'; did you mean --port?\n")
    code, stderr = failing("--model", str(tmp_path))
    assert (code, stderr.count("\n")) == (2, 1)
    assert "it has no model_index.json" in stderr


def test_a_checkpoint_that_the_worker_cannot_load_ends_the_start(tiny_qwen_image, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    for part in tiny_qwen_image.iterdir():
        (broken / part.name).symlink_to(part)
    (broken / "vae").unlink()
    (broken / "vae").mkdir()
    (broken / "vae" / "config.json").write_bytes((tiny_qwen_image / "vae" / "config.json").read_bytes())
    port = free_port()
    code, stderr = failing("--model", str(broken), "--port", port)
    assert code == 2, stderr
    assert "vae" in stderr.splitlines()[-1]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", int(port)))
