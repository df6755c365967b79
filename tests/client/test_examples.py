"""The examples run as they stand."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import PIL.Image

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


async def run(example, *arguments):
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(ROOT / "examples" / example), *map(str, arguments),
        stdout=asyncio.subprocess.PIPE, env=ENVIRONMENT,
    )  # fmt: skip
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode()


async def test_client_sync(service, tmp_path):
    output = await run("client_sync.py", f"127.0.0.1:{service.server.port}", tmp_path / "out.png")
    assert "step 8 of 8" in output
    assert "seed 7, 256 x 256" in output
    assert PIL.Image.open(tmp_path / "out.png").size == (256, 256)


async def test_client_async(service, tmp_path):
    output = await run("client_async.py", f"127.0.0.1:{service.server.port}", tmp_path / "out")
    assert output.splitlines()[0] == "1 queued"
    assert "4 images, seeds [7, 7, 7, " in output
    assert [PIL.Image.open(tmp_path / f"out-{i}.png").size for i in range(4)] == [(128, 128)] * 4


def test_offline(tiny_qwen_image, tmp_path):
    arguments = [str(tiny_qwen_image), str(tmp_path / "out.png"), "--steps", "2", "--size", "32"]
    output = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "offline.py"), *arguments],
        env=ENVIRONMENT | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert "seed 7, 2 steps" in output
    assert PIL.Image.open(tmp_path / "out.png").size == (32, 32)
