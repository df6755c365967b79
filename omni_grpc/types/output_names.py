"""What output files are called: the extensions of each format, and the names of several outputs, in one place."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from omni_grpc.types.media import AudioFormat, ImageFormat, OutputFormat, VideoFormat
from omni_grpc.types.output_files import not_written

EXTENSIONS: Mapping[str, ImageFormat] = {
    ".png": ImageFormat.PNG,
    ".jpg": ImageFormat.JPEG,
    ".jpeg": ImageFormat.JPEG,
    ".webp": ImageFormat.WEBP,
    ".rgb": ImageFormat.RAW_RGB8,
}
"""File name extension -> image format."""
VIDEO_EXTENSIONS: Mapping[str, VideoFormat] = {".mp4": VideoFormat.MP4, ".webm": VideoFormat.WEBM}
AUDIO_EXTENSIONS: Mapping[str, AudioFormat] = {
    ".wav": AudioFormat.WAV,
    ".flac": AudioFormat.FLAC,
    ".mp3": AudioFormat.MP3,
    ".opus": AudioFormat.OPUS,
    ".ogg": AudioFormat.OPUS,
}
ALL_EXTENSIONS: Mapping[str, OutputFormat] = {**EXTENSIONS, **VIDEO_EXTENSIONS, **AUDIO_EXTENSIONS}

_NUMBERED = re.compile(r"(\d+)-")


def looks_like(kind: OutputFormat) -> OutputFormat:
    """The format that a file of this one is to whoever opens it: a fragmented MP4 is an MP4."""
    return VideoFormat.MP4 if kind is VideoFormat.FMP4 else kind


def extensions_of(kind: OutputFormat) -> list[str]:
    """The extensions that a file of this format may have, the usual one first."""
    return [name for name, other in ALL_EXTENSIONS.items() if other is looks_like(kind)]


def output_paths(path: Path, count: int) -> list[Path]:
    """The path of each output: `path`, or path-0, path-1... if there are several."""
    return [path] if count == 1 else [path.with_stem(f"{path.stem}-{i}") for i in range(count)]


def numbered_names(number: int, seeds: Sequence[int], kind: OutputFormat) -> list[str]:
    """The names of the outputs of one generation in a folder: NUMBER-SEED.EXT, and NUMBER-SEED-INDEX.EXT where two of
    them have the same seed, as layers do. `number` is that of the generation, written with at least five digits.
    """
    index: Iterator[str] = (f"-{i}" for i in range(len(seeds)))
    ends = list(index) if len(set(seeds)) < len(seeds) else [""] * len(seeds)
    suffix = extensions_of(kind)[0]
    return [f"{number:05d}-{seed}{end}{suffix}" for seed, end in zip(seeds, ends, strict=True)]


def reserve(folder: Path, seeds: Sequence[int], kind: OutputFormat) -> list[Path]:
    """Takes the names of the outputs of one generation in a folder, as empty files, under the number after the highest
    that is there; no file is overwritten, and what saves at the same time takes other numbers.

    Raises what `write_file` raises. None of the names is left taken then.
    """
    for number in itertools.count(_highest(folder) + 1):
        paths = [folder / name for name in numbered_names(number, seeds, kind)]
        if _taken(number, folder):
            continue
        if _reserved(paths):
            return paths
    raise AssertionError("there is always a next number")


def release(paths: Sequence[Path]) -> None:
    """Gives back names that were reserved and not written to."""
    for path in paths:
        if path.exists() and not path.stat().st_size:
            path.unlink()


def _highest(folder: Path) -> int:
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise not_written(folder, error) from error
    return max((int(found[1]) for name in names if (found := _NUMBERED.match(name))), default=0)


def _taken(number: int, folder: Path) -> bool:
    """Whether another generation has this number, perhaps since a moment ago."""
    return any(folder.glob(f"{number:05d}-*"))


def _reserved(paths: Sequence[Path]) -> bool:
    """Whether all of the names were free; they are taken now."""
    for i, path in enumerate(paths):
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        except FileExistsError:
            release(paths[:i])
            return False
        except OSError as error:
            release(paths[:i])
            raise not_written(path, error) from error
    return True
