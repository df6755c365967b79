"""The server as its users run it, with the bundled model in actors of a Ray of its own."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time

import psutil

from benchmarks.service.server import served
from omni_grpc.client import Client
from omni_grpc.config.sections import BUNDLED
from omni_grpc.engine.ray_local import USAGE
from tests.ray.conftest import ROOT, gone, named, of, within

FLAGS = ("--distributed-executor-backend", "ray", "--device", "cpu", "--warm-up-seconds", "0")
PLACE = re.compile(r"with its files in (\S+)")
ACTOR = re.compile(r"the worker is process (\d+) of node")


def found(server, pattern, count=1):
    """What the log has of a pattern, once it has it so often."""
    until = time.monotonic() + 60
    while len(values := pattern.findall(server.logged())) < count and time.monotonic() < until:
        time.sleep(0.1)
    return values


def test_a_real_server_with_two_replicas_survives_the_death_of_one_and_ends_with_all_of_ray():
    with served(BUNDLED, *FLAGS, "--data-parallel-size", "2", "--restart-backoff", "0") as server:
        actors = [int(pid) for pid in found(server, ACTOR, 2)]
        (folder,) = found(server, PLACE)
        with Client(server.address) as client:
            first = client.generate_image("a red circle", width=64, height=64, steps=2, seed=7)
            os.kill(actors[0], signal.SIGKILL)
            results = [client.generate_image("a red circle", width=64, height=64, steps=2, seed=7) for _ in range(4)]
            assert {result.files[0] for result in results} == {first.files[0]}
        assert len(found(server, ACTOR, 3)) == 3
        assert {address.partition(".")[0] for address in listening(folder)} == {"127"}, "nobody else reaches it"
        assert {psutil.Process(pid).nice() for pid in actors[1:]} == {psutil.Process().nice()}, "nothing goes before it"
        assert set(variables(folder, USAGE)) == {"0"}, "it reports to nobody"
    assert of(folder) == []
    assert not os.path.exists(folder)


def test_kill_9_of_the_server_ends_all_of_ray():
    command = [sys.executable, "-m", "tests.ray.alone"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        said = json.loads(process.stdout.readline())
        process.kill()
    assert gone(said["actor"])
    assert of(said["folder"]) == []
    assert within(15, lambda: not os.path.exists(said["folder"]))


def variables(folder, name):
    """The value that a variable has in each process of the Ray that has its files in a folder."""
    for process in named(folder):
        # workers come and go
        with contextlib.suppress(psutil.Error):
            yield process.environ().get(name)


def listening(folder):
    """The addresses at which those processes, and what they started, can be reached."""
    addresses = set()
    for process in named(folder):
        with contextlib.suppress(psutil.Error):
            for one in (process, *process.children(recursive=True)):
                sockets = [socket for socket in one.net_connections("tcp") if socket.status == psutil.CONN_LISTEN]
                addresses |= {socket.laddr.ip.removeprefix("::ffff:") for socket in sockets}
    return addresses
