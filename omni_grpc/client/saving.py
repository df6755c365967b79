"""Outputs on the user's disk: their names, and their parameters inside of them. With a server and without."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from omni_grpc.metadata import embedded, has_parameters
from omni_grpc.types.errors import InvalidArgument, Violation
from omni_grpc.types.output_files import write_file
from omni_grpc.types.output_names import ALL_EXTENSIONS, extensions_of, looks_like, output_paths, release, reserve
from omni_grpc.types.parameters import NotEmbedded, Parameters, has_place
from omni_grpc.types.requested import Requested
from omni_grpc.types.results import Artifact, Effective


class ParametersNotWritten(UserWarning):
    """A file was saved without the parameters of its generation."""


class Made(Protocol):
    """What came out of a generation."""

    @property
    def files(self) -> tuple[bytes, ...]: ...
    @property
    def artifacts(self) -> tuple[Artifact, ...]: ...
    @property
    def effective(self) -> Effective: ...
    @property
    def asked(self) -> Requested | None: ...


def save(made: Made, path: Path, *, metadata: bool) -> list[Path]:
    """Writes the outputs to `path`, or into it if it is a folder, and returns their paths. See `MediaResult.save`."""
    folder = path.is_dir()
    if not folder:
        check_extension(made, path)
    files = with_parameters(made, _warn) if metadata else made.files
    paths = paths_in(made, path) if folder else output_paths(path, len(files))
    try:
        for target, data in zip(paths, files, strict=True):
            write_file(target, data)
    finally:
        if folder:
            release(paths)
    return paths


def paths_in(made: Made, folder: Path) -> list[Path]:
    """New names for the outputs in a folder, which are reserved. See `output_names.reserve`."""
    return reserve(folder, [artifact.seed for artifact in made.artifacts], made.effective.output_format)


def check_extension(made: Made, path: Path) -> None:
    """Raises InvalidArgument for an extension that promises another format."""
    suffix, own = path.suffix.lower(), made.effective.output_format
    if ALL_EXTENSIONS.get(suffix) is not looks_like(own):
        rule = f"ends in {suffix or 'no extension'}, but the outputs are {own}; use {' or '.join(extensions_of(own))}"
        raise InvalidArgument(f"path {path} {rule}", violations=(Violation("path", rule),))


def with_parameters(made: Made, tell: Callable[[str], None]) -> Sequence[bytes]:
    """The files with their parameters in them, where these are known and the format has a place for them. A file that
    has them already, since the server wrote them, stays as it is, and keeps its SHA-256. `tell` is called with what
    keeps a file as it was.
    """
    kind, asked = made.effective.output_format, made.asked
    if asked is None or not has_place(kind):
        return made.files
    files = []
    for data, artifact in zip(made.files, made.artifacts, strict=True):
        if has_parameters(data):
            files.append(data)
            continue
        try:
            parameters = Parameters.of(
                asked, made.effective, seed=artifact.seed, index=artifact.index, layer=artifact.layer
            )
            files.append(embedded(data, kind, parameters.text(), parameters.infotext()))
        except NotEmbedded as error:
            tell(f"output {artifact.index} is written without its parameters: {error}")
            files.append(data)
    return files


def _warn(text: str) -> None:
    warnings.warn(text, ParametersNotWritten, stacklevel=5)
