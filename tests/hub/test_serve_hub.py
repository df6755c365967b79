"""A server whose model is on the hub: it listens at once, tells how far the download is, and can be stopped in it."""

from __future__ import annotations

import contextlib
import itertools
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from omni_grpc.client.channel import DIRECT
from omni_grpc.v1 import admin_pb2, admin_pb2_grpc, generation_pb2, generation_pb2_grpc
from tests.server.service import read_refusal

from .conftest import NEEDED, ROOT
from .fake_hub import Hold

pytestmark = pytest.mark.service

REPO = "tiny-org/tiny"
VAE = "vae/diffusion_pytorch_model.safetensors"
DOWNLOADING, LOADING, WARMING_UP, READY = range(1, 5)
SERVING, NOT_SERVING = 1, 2


class Starting:
    """A server from its first moment on, and what it writes to stderr."""

    def __init__(self, popen: subprocess.Popen[str]) -> None:
        self.popen = popen
        self.lines: list[str] = []
        self._queue: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        address = self.logged("listening on ").rpartition("listening on ")[2].split(",")[0]
        self.channel = grpc.insecure_channel(address, options=DIRECT)

    def logged(self, words: str) -> str:
        """The next line that has these words."""
        while words not in (line := self._queue.get(timeout=60)):
            assert line, "".join(self.lines)
        return line

    def load(self) -> Iterator[admin_pb2.LoadModelResponse]:
        return admin_pb2_grpc.AdminServiceStub(self.channel).LoadModel(admin_pb2.LoadModelRequest(model=REPO))

    def health(self) -> int:
        return health_pb2_grpc.HealthStub(self.channel).Check(health_pb2.HealthCheckRequest()).status

    def ended(self) -> tuple[int, str]:
        """Its exit code and what it had written to stdout."""
        assert self.popen.stdout is not None
        out = self.popen.stdout.read()
        self._thread.join()
        return self.popen.wait(60), out

    def _read(self) -> None:
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            self.lines.append(line)
            self._queue.put(line)
        self._queue.put("")


@contextlib.contextmanager
def server(environment: dict[str, str], *flags: str) -> Iterator[Starting]:
    command = [sys.executable, "-m", "omni_grpc.serve", "--model", REPO, "--device", "cpu", "--port", "0"]
    popen = subprocess.Popen(
        [*command, "--cpu-threads", "1", "--warm-up-seconds", "0", *flags],
        cwd=ROOT,
        env=environment | {"HF_HUB_DOWNLOAD_TIMEOUT": "60"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield Starting(popen)
    finally:
        popen.kill()
        popen.wait()


def unfinished(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "home").rglob("*.incomplete"))


def test_the_download_is_followed_until_the_model_is_served(hub, environment, tiny_qwen_image):
    files = {p.relative_to(tiny_qwen_image).as_posix(): p.read_bytes() for p in tiny_qwen_image.rglob("*.*")}
    hub.add(REPO, files)
    let = threading.Event()
    hub.faults[VAE] = [Hold(0, let)]
    weights = {path: len(data) for path, data in files.items() if path.endswith(".safetensors")}
    with server(environment) as starting:
        call = starting.load()
        messages = []
        for message in call:
            messages.append(message)
            if message.done_bytes == sum(weights.values()) - weights[VAE]:
                break
        assert {message.phase for message in messages} == {DOWNLOADING}
        assert messages[-1].total_bytes == sum(weights.values())
        assert messages[-1].file in weights
        assert messages[-1].component == messages[-1].file.partition("/")[0]
        assert starting.health() == NOT_SERVING
        request = generation_pb2.GenerateImageRequest(model=REPO, prompt="a star")
        with pytest.raises(grpc.RpcError) as caught:
            next(generation_pb2_grpc.GenerationServiceStub(starting.channel).GenerateImage(request))
        assert read_refusal(caught.value).reason == "MODEL_LOADING"
        let.set()
        rest = list(call)
        phases = [phase for phase, _ in itertools.groupby(message.phase for message in (*messages, *rest))]
        assert phases[-1] == READY
        assert phases == sorted(phases), "none comes again"
        assert LOADING in phases
        assert rest[-1].model.name == REPO
        assert rest[-1].model.limits.size_multiple > 0
        assert starting.health() == SERVING
        starting.popen.terminate()
        code, out = starting.ended()
    assert code == 0
    assert "listening on " in out
    assert f"(model {REPO}, cpu float32)" in out
    log = "".join(starting.lines)
    for component in ("transformer", "text_encoder", "vae"):
        assert f"downloading {component}: 0% (0 bytes of " in log
        assert f"downloading {component}: 100% (" in log
    assert "HTTP Request" not in log
    assert "Traceback" not in log


def test_a_model_that_cannot_be_had_ends_the_call_and_the_server(hub, environment):
    hub.add(REPO, NEEDED, gated=True)
    hub.gate.clear()
    with server(environment) as starting:
        call = starting.load()
        assert next(call).phase == DOWNLOADING
        hub.gate.set()
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        error = read_refusal(caught.value)
        assert (error.code, error.reason) == ("FAILED_PRECONDITION", "MODEL_GATED")
        assert "hf auth login" in error.message
        assert starting.ended() == (2, "")
    assert starting.lines[-1] == f"error: {error.message}\n"
    assert "Traceback" not in "".join(starting.lines)


def test_a_setting_that_is_refused_is_refused_before_the_weights_come(hub, environment, tiny_qwen_image):
    files = {p.relative_to(tiny_qwen_image).as_posix(): p.read_bytes() for p in tiny_qwen_image.rglob("*.*")}
    hub.add(REPO, files)
    with server(environment, "--flow-shift", "3") as starting:
        assert starting.ended() == (2, "")
    assert starting.lines[-1].startswith("error: --flow-shift has no effect on QwenImagePipeline, which is native")
    assert not [path for path in hub.downloads() if path.endswith(".safetensors")]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGKILL, -9)])
def test_a_server_that_ends_in_a_download_leaves_nothing_behind(hub, environment, tmp_path, number, code):
    hub.add(REPO, NEEDED | {VAE: b"v" * (12 << 20)})
    hub.faults[VAE] = [Hold(11 << 20, threading.Event())]
    with server(environment) as starting:
        call = starting.load()
        assert any(message.done_bytes >= 10 << 20 for message in call), "the first part of a file that does not end"
        assert len(unfinished(tmp_path)) == 1
        children = psutil.Process(starting.popen.pid).children()
        (fetching,) = (child for child in children if "spawn_main" in " ".join(child.cmdline()))
        starting.popen.send_signal(number)
        assert starting.ended() == (code, "")
        with contextlib.suppress(psutil.NoSuchProcess):
            fetching.wait(10)
    assert unfinished(tmp_path) == []
    assert not list((tmp_path / "home").rglob("refs/main")), "it is not taken for a checkpoint that is complete"
