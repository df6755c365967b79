"""The first two minutes: serves a tiny checkpoint on this machine and generates one image, with streamed progress.

Nothing in it is staged: the server is `python -m omni_grpc.serve` in a process of its own, the client is `python -m
omni_grpc generate`. Only the checkpoint is a stand-in, with random weights, so what it draws is noise.
"""

from __future__ import annotations

import argparse
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

from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
BUILDER = ROOT / "tools" / "tiny_checkpoints.py"
CHECKPOINT = ROOT / ".demo" / "qwen_image"
IMAGE = ROOT / "demo.png"
PROMPT = "a red circle left of a blue square"
WIDTH = HEIGHT = 128
LISTENING = re.compile(r"listening on (\S+:\d+)")
BUILD_SECONDS, START_SECONDS, GENERATE_SECONDS, STOP_SECONDS = 300.0, 180.0, 300.0, 30.0


class DemoError(Exception):
    """The demo failed; the message says where."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint-only", action="store_true", help="build the demo checkpoint and stop")
    options = parser.parse_args()
    try:
        build_checkpoint()
        if options.checkpoint_only:
            return 0
        IMAGE.unlink(missing_ok=True)
        with served() as address:
            generate(address)
        check_image()
    except (DemoError, subprocess.TimeoutExpired) as error:
        print(f"demo: failed: {error}", file=sys.stderr)
        return 1
    print(f"demo: {IMAGE} is a {WIDTH} x {HEIGHT} PNG.")
    print("demo: this checkpoint has random weights, so it draws noise; serve a trained one: make serve MODEL=DIR")
    return 0


def build_checkpoint() -> None:
    """Builds the checkpoint where it is missing or older than the code that makes it."""
    if CHECKPOINT.is_dir() and CHECKPOINT.stat().st_mtime >= BUILDER.stat().st_mtime:
        return
    say(f"building a tiny checkpoint with random weights in {CHECKPOINT.relative_to(ROOT)}")
    partial = CHECKPOINT.with_name(CHECKPOINT.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.parent.mkdir(exist_ok=True)
    command = [sys.executable, str(BUILDER), "qwen_image", str(partial)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)
    if built.returncode != 0:
        raise DemoError(f"{BUILDER.name} ended with status {built.returncode}:\n{built.stdout}{built.stderr}")
    partial.touch()  # its time is compared with that of the builder
    shutil.rmtree(CHECKPOINT, ignore_errors=True)
    partial.rename(CHECKPOINT)


@contextlib.contextmanager
def served() -> Iterator[str]:
    """Runs the server for the length of the block and gives its address. What it prints is shown.

    Raises DemoError where it does not start, and where it does not stop cleanly when asked to.
    """
    arguments = ["--model", str(CHECKPOINT), "--host", "127.0.0.1", "--port", "0"]
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
    target = ["--server", address, "--model", CHECKPOINT.name, "--out", str(IMAGE)]
    command = [sys.executable, "-m", "omni_grpc", "generate", PROMPT, *target, *size, "--steps", "8", "--seed", "7"]
    say(f"generating {PROMPT!r}")
    status = subprocess.run(command, cwd=ROOT, timeout=GENERATE_SECONDS, check=False).returncode
    if status != 0:
        raise DemoError(f"the client ended with status {status}")


def check_image() -> None:
    """Raises DemoError where the file is not a whole PNG of the size that was asked for."""
    try:
        with Image.open(IMAGE) as image:
            image.load()
            found = (image.format, *image.size)
    except OSError as error:
        raise DemoError(f"{IMAGE} is no image: {error}") from error
    if found != ("PNG", WIDTH, HEIGHT):
        raise DemoError(f"{IMAGE} is {found}, expected a PNG of {WIDTH} x {HEIGHT}")


def say(message: str) -> None:
    print(f"demo: {message}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
