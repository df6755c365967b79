"""Clips of a native video model as files: made on this machine, and by a server."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from omni_grpc.checkpoint.registry import open_checkpoint
from omni_grpc.config import EngineConfig
from omni_grpc.engine import Engine, LocalExecutor
from omni_grpc.fleet import Fleet
from omni_grpc.gate import Gate
from omni_grpc.server import Server
from tests.server.studio import png
from tools.tiny_checkpoints import build_wan_t2v, build_wan_ti2v

pytestmark = pytest.mark.service


def clip(path: Path) -> tuple[Fraction | None, list[Any]]:
    """Frames per second and pictures of a file, and that its container says how long it is."""
    with av.open(str(path)) as file:
        stream = file.streams.video[0]
        pictures = [frame.to_ndarray(format="rgb24") for frame in file.decode(stream)]
        assert file.duration / av.time_base == pytest.approx(len(pictures) / stream.average_rate, abs=0.02)
        return stream.average_rate, pictures


async def test_a_clip_is_made_on_this_machine(run, tmp_path):
    """From a first frame, with the rate of the model; the default task follows from the input."""
    folder = build_wan_ti2v(tmp_path / "ti2v")
    tmp_path.joinpath("first.png").write_bytes(png(64, 32))
    out = tmp_path / "out.mp4"
    done = await run(
        "video", "a red cat", "--first-frame", tmp_path / "first.png", "--width", 64, "--height", 32, "--num-frames", 9,
        "--steps", 2, "--seed", 3, "--negative-prompt", "", "--model", folder, "--device", "cpu", "--cpu-threads", 1,
        "--out", out, "--json", "--quiet",
    )  # fmt: skip
    assert done.code == 0, done.err
    record = json.loads(done.out)
    effective, (artifact,) = record["effective"], record["artifacts"]
    assert (effective["num_frames"], effective["fps"], effective["output_fps"]) == (9, 24, 24)
    assert effective["guidance"]["true_cfg_scale"] == 5.0
    assert (artifact["width"], artifact["height"], artifact["num_frames"], artifact["fps"]) == (64, 32, 9, 24)
    rate, pictures = clip(out)
    assert (rate, [picture.shape for picture in pictures]) == (24, [(32, 64, 3)] * 9)
    assert all(picture.std() > 1 for picture in pictures)


async def test_clips_are_made_by_a_server(run, tmp_path):
    """MP4 and WebM, two experts of which the second has a scale of its own; a length in seconds, another rate in the
    file, and a boundary that lets the second expert do everything.
    """
    folder = build_wan_t2v(tmp_path / "t2v")
    config = EngineConfig.from_settings(model=str(folder), port=0, device="cpu", cpu_threads=1, warm_up_seconds=0)
    checkpoint = open_checkpoint(folder, name="tiny")
    assert checkpoint.spec.family == "wan", "the native model, without being asked"
    server = Server(Gate(Fleet.of(Engine(config, checkpoint, LocalExecutor(config, checkpoint)))), config)
    await server.start()
    asked = (
        "video", "a red cat", "--width", 48, "--height", 32, "--duration", 0.5, "--steps", 2, "--seed", 1,
        "--negative-prompt", "blurry", "--server", f"127.0.0.1:{server.port}", "--json", "--quiet",
    )  # fmt: skip
    try:
        mp4 = await run(*asked, "--out", tmp_path / "a.mp4", "--true-cfg-scale", 5, "--true-cfg-scale-2", 2)
        webm = await run(*asked, "--out", tmp_path / "a.webm", "--output-fps", 8, "--boundary-ratio", 1)
    finally:
        await server.stop()
    assert (mp4.code, webm.code) == (0, 0), (mp4.err, webm.err)
    first, second = (json.loads(done.out)["effective"] for done in (mp4, webm))
    parts = ("true_cfg_scale", "scale_low_noise", "boundary_ratio")
    assert [first["guidance"][part] for part in parts] == [5, 2, 0.875]
    assert [second["guidance"][part] for part in parts] == [4, 3, 1]
    assert [(it["num_frames"], it["fps"], it["output_fps"]) for it in (first, second)] == [(9, 16, 16), (9, 16, 8)]
    (rate, pictures), (slower, others) = clip(tmp_path / "a.mp4"), clip(tmp_path / "a.webm")
    assert (rate, slower) == (16, 8)
    assert [picture.shape for picture in pictures + others] == [(32, 48, 3)] * 18
    assert np.abs(pictures[4].astype(int) - others[4].astype(int)).mean() > 1
