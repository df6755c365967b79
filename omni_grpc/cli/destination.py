"""Where the outputs of a command go: --out, --output-dir, --format, --no-metadata, and writing them there."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omni_grpc.client import Client, MediaResult
from omni_grpc.client.saving import paths_in, with_parameters
from omni_grpc.omni import Generation
from omni_grpc.types.errors import OmniError, PermissionDenied, Unauthenticated, Unimplemented
from omni_grpc.types.media import OutputFormat
from omni_grpc.types.os_errors import plain
from omni_grpc.types.output_files import check_writable, write_file
from omni_grpc.types.output_names import looks_like, output_paths, release


def add(parser: Any, formats: Mapping[str, Any]) -> None:
    """Adds the arguments. `formats`: what goes to the argument of --format."""
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--out", "--output", type=Path, metavar="FILE", help="output file; several outputs get -0, -1... appended"
    )
    add_folder(where)
    parser.add_argument(
        "--format", help="output format (default: by the extension of --out, or as the model says)", **formats
    )
    add_metadata(parser)


def add_folder(parser: Any, **more: Any) -> None:
    parser.add_argument(
        "--output-dir",
        type=Path,
        metavar="DIR",
        help="folder for the outputs, which are called NUMBER-SEED.EXT; made if it is not there, and nothing in it is "
        "overwritten",
        **more,
    )


def add_metadata(parser: Any) -> None:
    parser.add_argument(
        "--no-metadata",
        dest="metadata",
        action="store_false",
        help="do not write the parameters (prompt, seed, model, settings) into the files; raw pixels never have them",
    )


def chosen_format(args: argparse.Namespace, extensions: Mapping[str, OutputFormat]) -> OutputFormat | None:
    """The format to ask for, None for the model's own. Refuses a name that promises none, before anything is asked."""
    chosen: OutputFormat | None = args.format
    if args.out is None:
        return chosen
    suffix = args.out.suffix.lower()
    if chosen is None and suffix not in extensions:
        known = ", ".join(extensions)
        args.parser.error(f"--out {args.out}: unknown extension {suffix!r}; use one of {known}, or give --format")
    chosen = chosen or extensions[suffix]
    if extensions.get(suffix, chosen) is not looks_like(chosen):
        print(f"warning: {args.out} will contain {chosen}, because --format overrides its extension", file=sys.stderr)
    return chosen


def check(args: argparse.Namespace) -> None:
    """Refuses a place that cannot be written to, before there is anything to write. Makes --output-dir."""
    if args.out is None:
        check_writable(made_folder(args) / "probe")
        return
    if not args.out.parent.is_dir():
        args.parser.error(f"--out {args.out}: the folder {args.out.parent} does not exist")
    check_writable(args.out)


def made_folder(args: argparse.Namespace) -> Path:
    """The folder of --output-dir, which is made if only it is missing."""
    folder: Path = args.output_dir
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        args.parser.error(f"--output-dir {plain(error)}; name a folder, or a new one in a folder that exists")
    return folder


def asked_server(client: Client) -> str:
    """The version of a server, "" where this caller or this port may not ask for it."""
    try:
        return client.server_info().version
    except (PermissionDenied, Unauthenticated, Unimplemented):
        return ""


def with_server(made: MediaResult, version: str) -> MediaResult:
    """The result, whose files say which server made them."""
    asked = made.asked and dataclasses.replace(made.asked, server=version)
    return dataclasses.replace(made, asked=asked)


def write(args: argparse.Namespace, made: MediaResult | Generation) -> list[Path]:
    """Writes the outputs. The error of one that cannot be written comes with the way to have it and those after it."""
    files = with_parameters(made, tell) if args.metadata else made.files
    paths = paths_in(made, args.output_dir) if args.out is None else output_paths(args.out, len(files))
    try:
        for index, (path, data) in enumerate(zip(paths, files, strict=True)):
            try:
                write_file(path, data)
            except OmniError as error:
                for note in _how_to_have(args, made, paths, index):
                    error.add_note(note)
                raise
    finally:
        if args.out is None:
            release(paths)
    return paths


def tell(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)


def _how_to_have(
    args: argparse.Namespace, made: MediaResult | Generation, paths: Sequence[Path], first: int
) -> Iterator[str]:
    """What to do for the outputs from `first` on, once they can be written."""
    if first:
        yield f"written: {', '.join(map(str, paths[:first]))}"
    if isinstance(made, Generation):
        yield f"run the command again once that is mended; the seed was {made.seeds[0]}"
        return
    yield f"job {made.job_id} is done, and its outputs are still on the server; once that is mended, fetch them with"
    for artifact, path in list(zip(made.artifacts, paths, strict=True))[first:]:
        words = ("download", artifact.artifact_id, "--server", args.server or args.default_server, "--out", str(path))
        yield f"  python -m omni_grpc {shlex.join(words)}"
