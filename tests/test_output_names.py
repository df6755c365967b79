"""Names of outputs: of one path, and in a folder, where nothing is overwritten."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from omni_grpc.types.errors import FailedPrecondition
from omni_grpc.types.media import AudioFormat, ImageFormat, VideoFormat
from omni_grpc.types.output_names import extensions_of, numbered_names, release, reserve


def test_names_are_made_of_number_seed_and_where_seeds_repeat_index() -> None:
    assert numbered_names(3, [7], ImageFormat.PNG) == ["00003-7.png"]
    assert numbered_names(123456, [7, 8], VideoFormat.FMP4) == ["123456-7.mp4", "123456-8.mp4"]
    assert numbered_names(1, [7, 7], ImageFormat.WEBP) == ["00001-7-0.webp", "00001-7-1.webp"]
    assert extensions_of(AudioFormat.OPUS) == [".opus", ".ogg"]


def test_the_next_number_is_taken(tmp_path: Path) -> None:
    (tmp_path / "00007-1.png").touch()
    (tmp_path / "notes.txt").touch()
    taken = reserve(tmp_path, [1, 2], ImageFormat.JPEG)
    assert [path.name for path in taken] == ["00008-1.jpg", "00008-2.jpg"]
    taken[0].write_bytes(b"x")
    release(taken)
    assert [path.exists() for path in taken] == [True, False]


def test_those_that_save_at_the_same_time_take_other_names(tmp_path: Path) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.extend(reserve(tmp_path, [1], ImageFormat.PNG))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 8


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match="cannot write"):
        reserve(tmp_path / "none", [1], ImageFormat.PNG)
