"""The commands that generate media: generate, edit, video, audio. On a server, or on this machine."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import enum
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from omni_grpc.cli import connect, destination, like
from omni_grpc.client import MediaResult
from omni_grpc.client.progress import progress_display, warning_line
from omni_grpc.config import EngineConfig, Option, model_of, options
from omni_grpc.config.flags import SettingsParser
from omni_grpc.config.settings import ALWAYS
from omni_grpc.omni import Generation, Omni
from omni_grpc.types.cache_choice import Choice, cache_choice
from omni_grpc.types.errors import OmniError
from omni_grpc.types.json_text import read_json
from omni_grpc.types.library_logs import quiet_libraries
from omni_grpc.types.media import AudioFormat, ImageFormat, OutputFormat, VideoFormat
from omni_grpc.types.output_names import AUDIO_EXTENSIONS, EXTENSIONS, VIDEO_EXTENSIONS
from omni_grpc.types.parameters import Parameters
from omni_grpc.types.request_options import (
    ALL,
    AUDIO,
    CACHE,
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
SERVER_ONLY = (
    "timeout",
    "verbose",
    *connect.FLAGS,
    *(option.name for option in OPTIONS if option.needs_server and option.cli),
)
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
    prompts = [prompt for prompt in (args.prompt, args.prompt_flag) if prompt is not None]
    if len(prompts) > 1 or not (prompts or args.like):
        args.parser.error("give exactly one prompt: as a positional argument or with --prompt")
    args.prompt = prompts[0] if prompts else None
    if args.model is not None and not args.model.strip():
        args.parser.error(f"--model is {args.model!r}: give a model's name or a checkpoint folder, or leave it out")
    chosen = destination.chosen_format(args, command.extensions)
    offline = args.server is None and args.model is not None and Path(model_of(args.model)).is_dir()
    _refuse_options(args, offline)
    given = [option.name for option in command.options if getattr(args, option.name) is not None]
    found = None
    if args.like is not None:
        found = like.fill(args, command.kind, command.options)
        chosen = chosen or next((k for k in command.formats if k == found.effective.get("output_format")), None)
    if command.kind == EDIT and args.images is None:
        args.parser.error("the following arguments are required: --image")
    asked = {option.name: _value(args, option) for option in command.options} | {"output_format": chosen}
    destination.check(args)
    made = _here(args, asked) if offline else _there(args, asked, found)
    if found is not None:
        _compare(args, made, found, given)
    _tell(args, made, destination.write(args, made))
    return 0


def _compare(args: argparse.Namespace, made: MediaResult | Generation, found: Parameters, given: Sequence[str]) -> None:
    """Tells what is not as it was for the file of --like."""
    notes = [like.other_model(found, args.like, made.asked.model)] if made.asked is not None else []
    for note in (*filter(None, notes), *like.differences(found, made.effective, given)):
        destination.tell(note)


def _value(args: argparse.Namespace, option: RequestOption) -> Any:
    """The value of an option; repeatable pairs come as a mapping."""
    value = getattr(args, option.name)
    return dict(value) if value and option.type in PAIRS else value


def _refuse_options(args: argparse.Namespace, offline: bool) -> None:
    """Refuses options without effect, so that none is silently ignored: some need a server, some need its absence."""
    if args.embed_parameters and not args.metadata:
        args.parser.error("--embed-parameters writes what --no-metadata leaves out; give one of them")
    shared = {option.name for option in args.command.options}
    names = SERVER_ONLY if offline else tuple(o.name for o in _offline_options() if o.name not in shared)
    for name in names:
        if getattr(args, name) is not None:
            why = "has no effect without a server" if offline else "is a setting of the server, which is running"
            flag = next((like.flag_of(o) for o in args.command.options if o.name == name), f"--{name}")
            args.parser.error(f"{flag.replace('_', '-')} {why}")


def _there(args: argparse.Namespace, asked: Mapping[str, Any], found: Parameters | None) -> MediaResult:
    try:
        with connect.connect(args, args.server or args.default_server) as client:
            made: MediaResult = getattr(client, args.command.method)(
                args.prompt,
                model=args.model or (found and found.asked.model),
                progress=not args.quiet,
                timeout=args.timeout,
                **asked,
            )
            return destination.with_server(made, destination.asked_server(client)) if args.metadata else made
    except OmniError as error:
        if found is not None:
            like.refused(error, found, args.like)
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
    if args.verbose and isinstance(made, MediaResult):
        print(f"job {made.job_id}, trace {made.trace_id or 'none'}", file=sys.stderr)
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
        "trace_id": (made.trace_id or None) if isinstance(made, MediaResult) else None,
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
    destination.add(parser, {"type": _format(command.formats), "choices": list(command.formats)})
    like.add(parser)
    parser.add_argument("--server", type=connect.server_address, metavar="ADDRESS", help=connect.server_help())
    parser.add_argument(
        "--model",
        help="model of the server (default: its only one); without --server, a checkpoint folder to run locally, or "
        "demo, the bundled model",
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
        own = option.of_job or option.of != ALL
        group = served if option.needs_server else parser if own else sampling
        if pair := pair_of.get(option.name):
            group = pairs[pair] = pairs.get(pair) or group.add_mutually_exclusive_group()
        _add(group, option)
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.add_argument("--quiet", action="store_true", help="do not show progress")
    about = "say on stderr which job and which trace it was"
    served.add_argument("--verbose", action="store_true", default=None, help=about)
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
    sections = (
        *("model", "adapter", "cache", "quantization", "loras", "offload", "recipes"),
        *("outbound", "parallel", "ranks"),
    )
    elsewhere = ("model", "served_model_name", "rank_port", "rank_secret_file")
    return (o for o in options() if o.section in sections and o.name not in elsewhere)


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


def _cache(text: str) -> Choice:
    with contextlib.suppress(TypeError, ValueError):
        return cache_choice(read_json(text) if text.startswith("{") else text)
    raise argparse.ArgumentTypeError(f"{text!r} is not {CACHE.expected}, as JSON")


def _seeds(text: str) -> tuple[int, ...]:
    with contextlib.suppress(ValueError):
        return tuple(int(part) for part in text.split(","))
    raise argparse.ArgumentTypeError(f"{text!r} is not a list of integers such as 1,2,3")


def _numbers(text: str) -> tuple[float, ...]:
    with contextlib.suppress(ValueError):
        return tuple(float(part) for part in text.split(","))
    raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 1,0.75,0.5")


def _format(kind: type[T]) -> Callable[[str], T]:
    return lambda text: _member(kind, "JPEG" if text.upper() == "JPG" else text)


def _choice(kind: type[T]) -> Callable[[str], T]:
    return lambda text: _member(kind, text.replace("-", "_"))


def _member(kind: type[T], text: str) -> T:
    with contextlib.suppress(ValueError):
        return kind(text.upper())
    raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(kind)}")


ARGUMENTS: Mapping[str, Mapping[str, Any]] = {
    "FLAG": {"action": "store_true", "default": None},
    "TEXT": {"metavar": "TEXT"},
    "COUNT": {"type": int, "metavar": "N"},
    "SIGNED": {"type": int, "metavar": "N"},
    "SEED": {"type": int, "metavar": "N"},
    "SEEDS": {"type": _seeds, "metavar": "N,N,..."},
    "NUMBER": {"type": float, "metavar": "X"},
    "NUMBERS": {"type": _numbers, "metavar": "X,X,..."},
    "FRACTION": {"type": float, "metavar": "X"},
    "SECONDS": {"type": float, "metavar": "S"},
    "LORAS": {"type": _adapter, "metavar": "NAME[=SCALE]", "action": "append"},
    "CACHE": {"type": _cache, "metavar": "CACHE"},
    "EXTRA": {"type": _extra, "metavar": "NAME=JSON", "action": "append"},
    "LABELS": {"type": label, "metavar": "KEY=VALUE", "action": "append"},
    "MEDIA": {"type": Path, "metavar": "FILE"},
    "MEDIA_LIST": {"type": Path, "metavar": "FILE", "action": "append"},
}
"""How a value is written on the command line, by the name of its type."""
