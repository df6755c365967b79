"""The command line with several models: real processes, real checkpoints, a budget that holds one of two."""

import contextlib
import signal
import subprocess
import sys
import time

import pytest

from omni_grpc.client import Client
from tests.server.process import ROOT

GIB = 1 << 30


@contextlib.contextmanager
def serving(tmp_path, *argv):
    log = (tmp_path / "server.log").open("w")
    process = subprocess.Popen(
        [sys.executable, "-m", "omni_grpc.serve", "--port", "0", "--device", "cpu", "--warm-up-seconds", "0", *argv],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True,
    )  # fmt: skip
    try:
        line = process.stdout.readline()
        assert "listening on" in line, (tmp_path / "server.log").read_text()
        yield line, line.split("listening on ")[1].split()[0]
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@pytest.mark.service
def test_two_models_take_turns_in_the_memory_of_one(tmp_path, tiny_qwen_image):
    argv = ("--model", f"a={tiny_qwen_image}", "--model", "b=demo", "--model-turn", "0")
    with serving(tmp_path, *argv, "--gpu-memory-budget", "0.0001") as (line, address), Client(address) as client:
        assert "(models a, b, cpu float32)" in line
        made = {}
        for _ in range(2):
            for name in ("a", "b"):
                began = time.monotonic()
                image = client.generate_image("a star", model=name, width=64, height=64, steps=2, seed=3)
                assert time.monotonic() - began < 60
                made.setdefault(name, []).append(image.files[0])
        # what was read again makes the same bytes
        assert all(first == second for first, second in made.values())
        assert made["a"][0] != made["b"][0]
    log = (tmp_path / "server.log").read_text()
    assert log.count("model a is awake after") >= 2
    assert log.count("sleeps:") >= 3
