"""--like FILE: a generation again, with the parameters that are in its file; and `show`, which prints them."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omni_grpc.metadata import parameters_in
from omni_grpc.types.errors import OmniError
from omni_grpc.types.json_text import read_json
from omni_grpc.types.parameters import Parameters
from omni_grpc.types.request_options import AUDIO, EDIT, EXCLUSIVE, IMAGE, VIDEO, RequestOption
from omni_grpc.types.results import Effective

COMMAND_OF: Mapping[str, str] = {IMAGE: "generate", EDIT: "edit", VIDEO: "video", AUDIO: "audio"}
"""Kind of generation -> the command that makes it."""
_MEDIA = ("MEDIA", "MEDIA_LIST")
_LENGTH = frozenset({"num_frames", "duration", "fps", "output_fps"})
"""Settings of a clip that follow from each other."""
_SCHEDULE = frozenset({"steps", "scheduler", "shift", "sigmas", "preset", "width", "height"})
"""Options that the noise levels follow from."""
_SEEDS = ("seed", "seeds", "num_outputs")


def add(parser: Any) -> None:
    parser.add_argument(
        "--like",
        type=Path,
        metavar="FILE",
        help="repeat the generation of this output, with the parameters that are in it; what is given here goes first",
    )


def fill(args: argparse.Namespace, kind: str, options: Sequence[RequestOption]) -> Parameters:
    """Fills in what the command line does not give from the file of --like. Exits for a file of another command, and
    where media of the request are missing; raises FailedPrecondition (NO_PARAMETERS) for a file without parameters.
    """
    found = parameters_in(args.like)
    asked = found.asked
    if asked.kind != kind:
        args.parser.error(f"--like {args.like} was made by another command: omni-grpc {COMMAND_OF[asked.kind]} --like")
    flags = {option.name: flag_of(option) for option in options}
    if missing := [name for name in asked.inputs if getattr(args, name, None) is None]:
        wanted = ", ".join(f"{flags[name]} ({len(asked.inputs[name])})" for name in missing)
        args.parser.error(f"--like {args.like} was made of files that are not in it: give {wanted} again")
    for name, media in asked.inputs.items():
        _compare_media(args, name, flags[name], media)
    again = found.again()
    given = {option.name for option in options if getattr(args, option.name) is not None}
    # one seed makes this one output; whoever asks for other or more seeds means all of them
    beside = {other for pair in (*EXCLUSIVE, ("seeds", "num_outputs")) if given & set(pair) for other in pair}
    known = {*(option.name for option in options), *_SEEDS, "output_format"}
    for name in again.keys() - known:
        print(f"warning: {args.like} has {name}, which this version does not know; it is left out", file=sys.stderr)
    for option in options:
        if option.name not in given | beside and option.type.name not in _MEDIA:
            setattr(args, option.name, again.get(option.name))
    args.prompt = asked.prompt if args.prompt is None else args.prompt
    return found


def flag_of(option: RequestOption) -> str:
    """The flag of an option as it is told."""
    return option.flags[0] if option.flags else "--" + option.name.replace("_", "-")


def other_model(found: Parameters, where: Path, model: str) -> str:
    """A note where the model is not the one that made the file, else an empty text."""
    if model == found.asked.model:
        return ""
    return f"{where} was made with the model {found.asked.model}, not {model}; the output will be another one"


def refused(error: OmniError, found: Parameters, where: Path) -> None:
    """Adds to the refusal of a server that has another model what to do about it."""
    if error.reason == "MODEL_NOT_FOUND":
        error.add_note(f"{where} was made with {found.asked.model}; to use another model, name it with --model")


def differences(found: Parameters, effective: Effective, given: Collection[str]) -> Iterator[str]:
    """What was done otherwise than for the file, although nobody asked for that."""
    now = read_json(json.dumps(dataclasses.asdict(effective)))
    said = {*_SEEDS, "defaults_used", "dropped_tokens", "output_format", *given}
    if not _LENGTH.isdisjoint(given):
        said |= _LENGTH
    if any(name.startswith(("guidance", "true_cfg", "boundary", "negative")) for name in given):
        said |= {"guidance", "evals"}
    if not _SCHEDULE.isdisjoint(given):
        said |= {"sigmas", "shift", "evals"}
    if "preset" in given:
        said |= {"steps", "scheduler", "guidance", "loras"}
    for name, value in found.effective.items():
        if name not in said and name in now and now[name] != value:
            yield f"{name} was {json.dumps(value)} and is {json.dumps(now[name])} now"


def _compare_media(args: argparse.Namespace, name: str, flag: str, media: Sequence[Mapping[str, str]]) -> None:
    """Warns about files that are not those of then."""
    given = getattr(args, name)
    for then, now in zip(media, given if isinstance(given, list) else [given], strict=False):
        path, known = Path(now), then.get("sha256")
        if known and path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() != known:
            print(f"warning: {flag} {path} is not the file that {args.like} was made of", file=sys.stderr)


# --- show -------------------------------------------------------------------------------------------------------------


def add_show(commands: Any) -> None:
    parser = commands.add_parser("show", help="show the parameters that are in output files")
    parser.set_defaults(run=_show)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each file")


def _show(args: argparse.Namespace) -> int:
    for number, path in enumerate(args.files):
        found = parameters_in(path)
        if args.json:
            print(json.dumps({"file": str(path)} | found.record()))
            continue
        if len(args.files) > 1:
            print(*([""] if number else []), f"{path}:", sep="\n")
        lines = list(found.lines())
        width = max(len(name) for name, _ in lines)
        for name, value in lines:
            print(f"{name:{width}}  {_printable(value)}")
    return 0


def _printable(text: str) -> str:
    """Without what would steer the terminal: the file may be of somebody else."""
    return "".join(one if one.isprintable() or one == "\n" else repr(one)[1:-1] for one in text)
