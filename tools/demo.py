"""The first two minutes: serves the bundled model on this machine and generates one image, with streamed progress.

    python -m tools.demo

Nothing in it is staged: the server is `python -m omni_grpc.serve` in a process of its own, the client is `python -m
omni_grpc generate`, and what the picture shows is measured. The server keeps its jobs in .demo/jobs, where they outlive
it; the next demo begins with an empty one, and `make clean` removes it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from omni_grpc.config.command_line import Parser
from omni_grpc.scenes.judge import judge, look
from omni_grpc.scenes.wish import Noun, Wish

ROOT = Path(__file__).resolve().parent.parent
IMAGE = ROOT / "demo.png"
KEPT = ROOT / ".demo" / "jobs"
PROMPT = "a red circle left of a blue square"
WISH = Wish((Noun(colour="red", shape="circle"), Noun(colour="blue", shape="square")), "left of")
WIDTH = HEIGHT = 128
LISTENING = re.compile(r"listening on (\S+:\d+)")
START_SECONDS, GENERATE_SECONDS, STOP_SECONDS = 180.0, 300.0, 30.0


class DemoError(Exception):
    """The demo failed; the message says where."""


def main() -> int:
    try:
        IMAGE.unlink(missing_ok=True)
        if KEPT.exists():
            shutil.rmtree(KEPT)
        with served() as address:
            generate(address)
        picture = check_image()
    except (DemoError, subprocess.TimeoutExpired) as error:
        print(f"demo: failed: {error}", file=sys.stderr)
        return 1
    say(f"{IMAGE} is a {WIDTH} x {HEIGHT} PNG")
    say(verdict(picture))
    kept = KEPT.relative_to(ROOT)
    say(f"its job is kept in {kept}: python -m omni_grpc.serve --state-dir {kept} goes on with it")
    return 0


@contextlib.contextmanager
def served() -> Iterator[str]:
    """Runs the server for the length of the block and gives its address. What it prints is shown.

    Raises DemoError where it does not start, and where it does not stop cleanly when asked to.
    """
    arguments = ["--host", "127.0.0.1", "--port", "0", "--state-dir", str(KEPT)]
    say("starting the server")
    server = subprocess.Popen(
        [sys.executable, "-m", "omni_grpc.serve", *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # its own group, so that a kill takes its workers too
    )
    addresses: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=forward, args=(server, addresses), daemon=True).start()
    try:
        yield wait_for_address(addresses, server)
    except BaseException:
        stop(server)
        raise
    status = stop(server)
    if status != 0:
        raise DemoError(f"the server ended with status {status} when it was asked to stop")


def forward(server: subprocess.Popen[str], addresses: queue.Queue[str | None]) -> None:
    """Shows every line of the server and picks its address out of them; None is the end of its output."""
    assert server.stdout is not None
    for line in server.stdout:
        print(line, end="", flush=True)
        if match := LISTENING.search(line):
            addresses.put(match[1])
    addresses.put(None)


def wait_for_address(addresses: queue.Queue[str | None], server: subprocess.Popen[str]) -> str:
    try:
        address = addresses.get(timeout=START_SECONDS)
    except queue.Empty:
        raise DemoError(f"the server is not listening after {START_SECONDS:.0f} s") from None
    if address is None:
        raise DemoError(f"the server ended with status {server.wait(STOP_SECONDS)} before it was listening")
    return address


def stop(server: subprocess.Popen[str]) -> int:
    """Asks the server to end, as an operator would. Returns its exit status; kills it where it takes too long."""
    if server.poll() is None:
        server.send_signal(signal.SIGTERM)
    try:
        return server.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        return server.wait(STOP_SECONDS)


def generate(address: str) -> None:
    """Runs the client with its output shown. Raises DemoError where it fails and TimeoutExpired where it hangs."""
    size = ["--width", str(WIDTH), "--height", str(HEIGHT)]
    target = ["--server", address, "--out", str(IMAGE)]
    command = [sys.executable, "-m", "omni_grpc", "generate", PROMPT, *target, *size, "--steps", "20", "--seed", "7"]
    say(f"generating {PROMPT!r}")
    status = subprocess.run(command, cwd=ROOT, timeout=GENERATE_SECONDS, check=False).returncode
    if status != 0:
        raise DemoError(f"the client ended with status {status}")


def check_image() -> np.ndarray:
    """The pixels. Raises DemoError where the file is not a whole PNG of the size that was asked for."""
    try:
        with Image.open(IMAGE) as image:
            pixels = np.asarray(image.convert("RGB"))
            found = (image.format, *image.size)
    except OSError as error:
        raise DemoError(f"{IMAGE} is no image: {error}") from error
    if found != ("PNG", WIDTH, HEIGHT):
        raise DemoError(f"{IMAGE} is {found}, expected a PNG of {WIDTH} x {HEIGHT}")
    return pixels


def verdict(picture: np.ndarray) -> str:
    """What the picture shows, measured."""
    seen = " and ".join(f"a {thing.colour} {thing.shape}" for thing in look(picture)) or "nothing"
    return f"it shows {seen}, {'as asked' if judge(WISH, picture).right else 'which is not what was asked for'}"


def say(message: str) -> None:
    print(f"demo: {message}", flush=True)


if __name__ == "__main__":
    Parser(description=__doc__).parse_args()
    sys.exit(main())
