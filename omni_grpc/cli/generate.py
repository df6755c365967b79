"""The commands that generate media: generate, edit, video, audio. On a server, or on this machine."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import enum
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from omni_grpc.cli import connect
from omni_grpc.client import MediaResult
from omni_grpc.client.progress import progress_display, warning_line
from omni_grpc.client.result import AUDIO_EXTENSIONS, EXTENSIONS, VIDEO_EXTENSIONS, output_paths
from omni_grpc.config import EngineConfig, Option, model_of, options
from omni_grpc.config.flags import SettingsParser
from omni_grpc.config.settings import ALWAYS
from omni_grpc.omni import Generation, Omni
from omni_grpc.types.errors import OmniError
from omni_grpc.types.json_text import read_json
from omni_grpc.types.library_logs import quiet_libraries
from omni_grpc.types.media import AudioFormat, ImageFormat, OutputFormat, VideoFormat
from omni_grpc.types.output_files import check_writable, write_file
from omni_grpc.types.request_options import (
    ALL,
    AUDIO,
    EDIT,
    EXCLUSIVE,
    EXTRA,
    IMAGE,
    LABELS,
    LORAS,
    OPTIONS,
    VIDEO,
    RequestOption,
    options_of,
)
from omni_grpc.types.results import Artifact

T = TypeVar("T", bound=enum.StrEnum)

PAIRS = (LORAS, EXTRA, LABELS)
SERVER_ONLY = ("timeout", *connect.FLAGS, *(option.name for option in OPTIONS if option.of_job and option.cli))
"""Arguments without effect when there is no server."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command, for one kind of generation. `method`: the client's method, and that of `Omni` unless `offline` names
    another.
    """

    name: str
    help: str
    kind: str
    method: str
    offline: str
    formats: type[ImageFormat] | type[VideoFormat] | type[AudioFormat]
    extensions: Mapping[str, OutputFormat]

    @property
    def options(self) -> list[RequestOption]:
        return [option for option in options_of(self.kind) if option.cli]


def add_commands(commands: Any) -> None:
    """Adds the commands to the subparsers of a command line."""
    for command in COMMANDS:
        parser = commands.add_parser(command.name, help=command.help)
        parser.set_defaults(run=_run, parser=parser, command=command, default_server=connect.default_server())
        _common(parser, command)


# --- running ----------------------------------------------------------------------------------------------------------


def _run(args: argparse.Namespace) -> int:
    command: Command = args.command
    if (args.prompt is None) == (args.prompt_flag is None):
        args.parser.error("give exactly one prompt: as a positional argument or with --prompt")
    args.prompt = args.prompt_flag if args.prompt is None else args.prompt
    suffix = args.out.suffix.lower()
    if args.format is None and suffix not in command.extensions:
        known = ", ".join(command.extensions)
        args.parser.error(f"--out {args.out}: unknown extension {suffix!r}; use one of {known}, or give --format")
    if not args.out.parent.is_dir():
        args.parser.error(f"--out {args.out}: the folder {args.out.parent} does not exist")
    chosen = args.format or command.extensions[suffix]
    if command.extensions.get(suffix, chosen) is not _looks_like(chosen):
        print(f"warning: {args.out} will contain {chosen}, because --format overrides its extension", file=sys.stderr)
    if args.model is not None and not args.model.strip():
        args.parser.error(f"--model is {args.model!r}: give a model's name or a checkpoint folder, or leave it out")
    offline = args.server is None and args.model is not None and Path(model_of(args.model)).is_dir()
    _refuse_options(args, offline)
    asked = {option.name: _value(args, option) for option in command.options} | {"output_format": chosen}
    check_writable(args.out)
    made = _here(args, asked) if offline else _there(args, asked)
    _tell(args, made, _written(args, made))
    return 0


def _written(args: argparse.Namespace, made: MediaResult | Generation) -> list[Path]:
    """Writes the outputs. The error of one that cannot be written comes with the way to have it and those after it."""
    paths = output_paths(args.out, len(made.files))
    for index, (path, data) in enumerate(zip(paths, made.files, strict=True)):
        try:
            write_file(path, data)
        except OmniError as error:
            for note in _how_to_have(args, made, paths, index):
                error.add_note(note)
            raise
    return paths


def _how_to_have(
    args: argparse.Namespace, made: MediaResult | Generation, paths: list[Path], first: int
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


def _value(args: argparse.Namespace, option: RequestOption) -> Any:
    """The value of an option; repeatable pairs come as a mapping."""
    value = getattr(args, option.name)
    return dict(value) if value and option.type in PAIRS else value


def _looks_like(kind: OutputFormat) -> OutputFormat:
    # a fragmented MP4 is an MP4 to whoever opens it
    return VideoFormat.MP4 if kind is VideoFormat.FMP4 else kind


def _refuse_options(args: argparse.Namespace, offline: bool) -> None:
    """Refuses options without effect, so that none is silently ignored: some need a server, some need its absence."""
    shared = {option.name for option in args.command.options}
    names = SERVER_ONLY if offline else tuple(o.name for o in _offline_options() if o.name not in shared)
    for name in names:
        if getattr(args, name) is not None:
            why = "has no effect without a server" if offline else "is a setting of the server, which is running"
            flag = next((o.flags[0] for o in args.command.options if o.name == name and o.flags), f"--{name}")
            args.parser.error(f"{flag.replace('_', '-')} {why}")


def _there(args: argparse.Namespace, asked: Mapping[str, Any]) -> MediaResult:
    try:
        with connect.connect(args, args.server or args.default_server) as client:
            made: MediaResult = getattr(client, args.command.method)(
                args.prompt,
                model=args.model,
                progress=not args.quiet,
                timeout=args.timeout,
                **asked,
            )
            return made
    except OmniError as error:
        if args.server is None and args.model is not None:
            where = f"so the request went to the server at {args.default_server}"
            error.add_note(f"{args.model} is not a folder on this machine, {where}")
        raise


def _here(args: argparse.Namespace, asked: Mapping[str, Any]) -> Generation:
    settings = {option.name: getattr(args, option.name) for option in _offline_options()}
    given = {name: value for name, value in settings.items() if value is not None}
    config = EngineConfig.from_settings(model=args.model, **given)
    if not args.quiet:
        print(f"loading {args.model}", file=sys.stderr)
    quiet_libraries()
    with Omni.of(config, alone=True) as omni, progress_display(not args.quiet) as show:
        made: Generation = getattr(omni, args.command.offline)(
            args.prompt,
            on_event=show,
            **{name: value for name, value in asked.items() if value is not None and name not in settings},
        )
        return made


def _tell(args: argparse.Namespace, made: MediaResult | Generation, paths: list[Path]) -> None:
    if args.json:
        print(json.dumps(_record(made, paths)))
        return
    if args.quiet:
        for warning in made.warnings:
            print(warning_line(warning), file=sys.stderr)
    for path, artifact in zip(paths, made.artifacts, strict=True):
        parts = (path, _measure(artifact), f"seed {artifact.seed}", f"{made.effective.steps} steps")
        print(*parts, f"{made.stats.total:.2f} s", sep="  ")


def _measure(artifact: Artifact) -> str:
    if not artifact.width:
        return f"{artifact.duration:.2f} s at {artifact.sample_rate_hz} Hz"
    size = f"{artifact.width} x {artifact.height}"
    return f"{size}  {artifact.num_frames} frames at {artifact.fps:g} fps" if artifact.num_frames else size


def _record(made: MediaResult | Generation, paths: list[Path]) -> dict[str, Any]:
    return {
        "job_id": made.job_id if isinstance(made, MediaResult) else None,
        "files": [str(path) for path in paths],
        "seeds": made.seeds,
        "artifacts": [dataclasses.asdict(artifact) for artifact in made.artifacts],
        "effective": dataclasses.asdict(made.effective),
        "warnings": [dataclasses.asdict(warning) for warning in made.warnings],
        "stats": dataclasses.asdict(made.stats),
    }


# --- arguments --------------------------------------------------------------------------------------------------------


def _common(parser: SettingsParser, command: Command) -> None:
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="text prompt")
    parser.add_argument("--prompt", "--prompts", dest="prompt_flag", metavar="PROMPT", help="the prompt as a flag")
    parser.add_argument(
        "--out",
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help="output file; several outputs get -0, -1... appended",
    )
    parser.add_argument("--server", type=connect.server_address, metavar="ADDRESS", help=connect.server_help())
    parser.add_argument(
        "--model",
        help="model of the server (default: its only one); without --server, a checkpoint folder to run locally, or "
        "demo, the bundled model",
    )
    parser.add_argument(
        "--format",
        type=_format(command.formats),
        choices=list(command.formats),
        help="output format (default: by the extension of --out)",
    )
    served = parser.add_argument_group("with a server")
    connect.add_credentials(served)
    sampling = parser.add_argument_group("sampling (default: as the model says)")
    settings = {option.name for option in _offline_options()}
    names = {option.name for option in command.options}
    pair_of = {name: pair for pair in EXCLUSIVE if names.issuperset(pair) for name in pair}
    pairs: dict[tuple[str, ...], Any] = {}
    for option in command.options:
        if option.name in settings:
            continue  # added below, where it is a setting of a worker too
        group = served if option.of_job else sampling if option.of == ALL else parser
        if pair := pair_of.get(option.name):
            group = pairs[pair] = pairs.get(pair) or group.add_mutually_exclusive_group()
        _add(group, option)
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.add_argument("--quiet", action="store_true", help="do not show progress")
    served.add_argument("--timeout", type=float, metavar="S", help="cancel and give up after this many seconds")
    local = parser.add_argument_group("on this machine")
    local.add_argument("--enforce-eager", action="store_true", help=ALWAYS["--enforce-eager"])
    for setting in _offline_options():
        parser.add_setting(setting, local)


def _add(group: Any, option: RequestOption) -> None:
    """The argument of one option."""
    flags = option.flags or ("--" + option.name.replace("_", "-"),)
    earlier = ["--" + name.replace("_", "-") for name in option.renamed]
    more: dict[str, Any] = {"dest": option.name, "help": option.doc.replace("%", "%%")}
    if option.type.choices is not None:
        more |= {"type": _choice(option.type.choices), "choices": list(option.type.choices)}
    else:
        more |= ARGUMENTS[option.type.name]
    if option.name == "images":
        more["required"] = True
    group.add_argument(*flags, **more)
    if earlier:
        group.add_argument(*earlier, **more | {"action": _Renamed, "help": argparse.SUPPRESS})


class _Renamed(argparse.Action):
    """A flag by its name of an earlier version: taken, with a warning."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        today = "--" + self.dest.replace("_", "-")
        print(
            f"warning: {option_string} is called {today} now; the old name goes with the next version", file=sys.stderr
        )
        setattr(namespace, self.dest, values)


COMMANDS: tuple[Command, ...] = (
    Command(
        name="generate",
        help="generate images, on a server or on this machine",
        kind=IMAGE,
        method="generate_image",
        offline="generate",
        formats=ImageFormat,
        extensions=EXTENSIONS,
    ),
    Command(
        name="edit",
        help="edit images: image to image, inpaint, layers",
        kind=EDIT,
        method="edit_image",
        offline="edit_image",
        formats=ImageFormat,
        extensions=EXTENSIONS,
    ),
    Command(
        name="video",
        help="generate videos from a prompt, images, a video or audio",
        kind=VIDEO,
        method="generate_video",
        offline="generate_video",
        formats=VideoFormat,
        extensions=VIDEO_EXTENSIONS,
    ),
    Command(
        name="audio",
        help="generate audio",
        kind=AUDIO,
        method="generate_audio",
        offline="generate_audio",
        formats=AudioFormat,
        extensions=AUDIO_EXTENSIONS,
    ),
)


def _offline_options() -> Iterator[Option]:
    """The settings of a worker and of what is fetched, which a running server has already decided."""
    sections = ("model", "adapter", "cache", "quantization", "loras", "offload", "outbound")
    return (o for o in options() if o.section in sections and o.name not in ("model", "served_model_name"))


def label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key, value


def _extra(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if equals and name:
        with contextlib.suppress(json.JSONDecodeError):
            return name, read_json(value)
    raise argparse.ArgumentTypeError(
        f"{text!r} is not NAME=JSON, for example max_sequence_length=256 or style='\"bold\"'"
    )


def _adapter(text: str) -> tuple[str, float]:
    name, equals, scale = text.partition("=")
    with contextlib.suppress(ValueError):
        if name:
            return name, float(scale) if equals else 1.0
    raise argparse.ArgumentTypeError(f"{text!r} is not NAME or NAME=SCALE, for example sketch=0.8")


def _seeds(text: str) -> tuple[int, ...]:
    with contextlib.suppress(ValueError):
        return tuple(int(part) for part in text.split(","))
    raise argparse.ArgumentTypeError(f"{text!r} is not a list of integers such as 1,2,3")


def _format(kind: type[T]) -> Callable[[str], T]:
    return lambda text: _member(kind, "JPEG" if text.upper() == "JPG" else text)


def _choice(kind: type[T]) -> Callable[[str], T]:
    return lambda text: _member(kind, text.replace("-", "_"))


def _member(kind: type[T], text: str) -> T:
    with contextlib.suppress(ValueError):
        return kind(text.upper())
    raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(kind)}")


ARGUMENTS: Mapping[str, Mapping[str, Any]] = {
    "TEXT": {"metavar": "TEXT"},
    "COUNT": {"type": int, "metavar": "N"},
    "SIGNED": {"type": int, "metavar": "N"},
    "SEED": {"type": int, "metavar": "N"},
    "SEEDS": {"type": _seeds, "metavar": "N,N,..."},
    "NUMBER": {"type": float, "metavar": "X"},
    "FRACTION": {"type": float, "metavar": "X"},
    "SECONDS": {"type": float, "metavar": "S"},
    "LORAS": {"type": _adapter, "metavar": "NAME[=SCALE]", "action": "append"},
    "EXTRA": {"type": _extra, "metavar": "NAME=JSON", "action": "append"},
    "LABELS": {"type": label, "metavar": "KEY=VALUE", "action": "append"},
    "MEDIA": {"type": Path, "metavar": "FILE"},
    "MEDIA_LIST": {"type": Path, "metavar": "FILE", "action": "append"},
}
"""How a value is written on the command line, by the name of its type."""
