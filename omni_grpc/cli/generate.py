"""The commands that make something: generate, edit, video, audio. On a server, or on this machine."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import enum
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from omni_grpc.client import Client, MediaResult
from omni_grpc.client.progress import progress_display, warning_line
from omni_grpc.client.result import AUDIO_EXTENSIONS, EXTENSIONS, VIDEO_EXTENSIONS, write_files
from omni_grpc.config import EngineConfig, Option, options
from omni_grpc.config.settings import ALWAYS
from omni_grpc.omni import Generation, Omni
from omni_grpc.types.errors import ConfigError, OmniError
from omni_grpc.types.media import AudioFormat, ImageFormat, OutputFormat, VideoFormat
from omni_grpc.types.request import GuidanceNorm, Task
from omni_grpc.types.results import Artifact

T = TypeVar("T", bound=enum.StrEnum)

SERVER_ONLY = ("request_id", "label", "timeout", "priority", "queue_timeout", "run_timeout", "retention")
SAMPLING = (
    "negative_prompt", "steps", "guidance_scale", "true_cfg_scale", "guidance_norm", "guidance_rescale",
    "guidance_start", "guidance_end", "true_cfg_scale_2", "seed", "seeds", "num_outputs", "scheduler",
)  # fmt: skip
BOTH = ("boundary_ratio",)
"""What is a setting of a worker on this machine, and a part of the request to a server."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command. `method` is the client's and, unless `offline` says otherwise, that of `Omni`; `fields` are the
    arguments that it passes on besides those that all commands have.
    """

    name: str
    help: str
    method: str
    offline: str
    formats: type[ImageFormat] | type[VideoFormat] | type[AudioFormat]
    extensions: Mapping[str, OutputFormat]
    arguments: Callable[[argparse.ArgumentParser], None]
    fields: tuple[str, ...]


def add_commands(commands: Any, default_server: str) -> None:
    """Adds the commands to the subparsers of a command line."""
    for command in COMMANDS:
        parser = commands.add_parser(command.name, help=command.help)
        parser.set_defaults(run=_run, parser=parser, command=command, default_server=default_server)
        _common(parser, command, default_server)
        command.arguments(parser)


# --- running ----------------------------------------------------------------------------------------------------------


def _run(args: argparse.Namespace) -> int:
    command: Command = args.command
    if (args.prompt is None) == (args.prompt_flag is None):
        args.parser.error("give the prompt once: as an argument, or as --prompt")
    args.prompt = args.prompt_flag if args.prompt is None else args.prompt
    suffix = args.out.suffix.lower()
    if args.format is None and suffix not in command.extensions:
        known = ", ".join(command.extensions)
        args.parser.error(f"--out {args.out}: unknown extension {suffix!r}; use one of {known}, or give --format")
    if not args.out.parent.is_dir():
        args.parser.error(f"--out {args.out}: there is no folder {args.out.parent}")
    chosen = args.format or command.extensions[suffix]
    if command.extensions.get(suffix, chosen) is not _looks_like(chosen):
        print(f"warning: {args.out} will hold {chosen}, as --format says", file=sys.stderr)
    offline = args.server is None and args.model is not None and Path(args.model).is_dir()
    _refuse_options(args, offline)
    asked = {name: getattr(args, name) for name in (*SAMPLING, *command.fields)}
    asked |= {"output_format": chosen}
    asked |= {name: dict(getattr(args, name)) if getattr(args, name) else None for name in ("extra", "loras")}
    made = _here(args, asked) if offline else _there(args, asked)
    _tell(args, made, write_files(made.files, args.out))
    return 0


def _looks_like(kind: OutputFormat) -> OutputFormat:
    # a fragmented MP4 is an MP4 to whoever opens it
    return VideoFormat.MP4 if kind is VideoFormat.FMP4 else kind


def _refuse_options(args: argparse.Namespace, offline: bool) -> None:
    """No option is passed over in silence: some have a meaning only with a server, some only without."""
    names = SERVER_ONLY if offline else tuple(o.name for o in _offline_options() if o.name not in BOTH)
    for name in names:
        if getattr(args, name) is not None:
            why = "has no effect without a server" if offline else "is a setting of the server, which is running"
            args.parser.error(f"--{name.replace('_', '-')} {why}")


def _there(args: argparse.Namespace, asked: Mapping[str, Any]) -> MediaResult:
    served = {name: getattr(args, name) for name in (*SERVER_ONLY, *BOTH) if name not in ("label", "timeout")}
    try:
        with Client(args.server or args.default_server) as client:
            made: MediaResult = getattr(client, args.command.method)(
                args.prompt,
                model=args.model,
                progress=not args.quiet,
                timeout=args.timeout,
                labels=dict(args.label or ()),
                **served,
                **asked,
            )
            return made
    except OmniError as error:
        if args.server is None and args.model is not None:
            where = f"so the server at {args.default_server} was asked"
            error.add_note(f"{args.model} is no folder on this machine, {where}")
        raise


def _here(args: argparse.Namespace, asked: Mapping[str, Any]) -> Generation:
    settings = {option.name: getattr(args, option.name) for option in _offline_options()}
    if not args.quiet:
        print(f"loading {args.model}", file=sys.stderr)
    given = {name: value for name, value in settings.items() if value is not None}
    config = EngineConfig.from_settings(model=args.model, **given)
    with Omni.of(config, alone=True) as omni, progress_display(not args.quiet) as show:
        made: Generation = getattr(omni, args.command.offline)(
            args.prompt, on_event=show, **{name: value for name, value in asked.items() if value is not None}
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
        return f"{artifact.duration:.2f} s at {artifact.sample_rate} Hz"
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


def _common(parser: argparse.ArgumentParser, command: Command, default_server: str) -> None:
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="what to make")
    parser.add_argument("--prompt", "--prompts", dest="prompt_flag", metavar="PROMPT", help="the same as a flag")
    parser.add_argument(
        "--out", "--output", type=Path, required=True, metavar="FILE", help="several outputs get -0, -1... appended"
    )
    parser.add_argument("--server", metavar="HOST:PORT", help=f"server to ask (default: {default_server})")
    parser.add_argument(
        "--model",
        help="a model of the server (default: its only one); without --server, a checkpoint folder runs here",
    )
    parser.add_argument(
        "--format",
        type=_format(command.formats),
        choices=list(command.formats),
        help="encoding (default: by the extension of --out)",
    )
    _sampling(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    served = parser.add_argument_group("with a server")
    served.add_argument("--request-id", metavar="ID", help="idempotency key (default: a new UUID4)")
    served.add_argument("--label", action="append", type=label, metavar="KEY=VALUE", help="label of the job")
    served.add_argument("--timeout", type=float, metavar="S", help="give up, and cancel, after this many seconds")
    served.add_argument("--priority", type=int, metavar="N", help="higher runs first")
    served.add_argument("--queue-timeout", type=float, metavar="S", help="fail a job that has not started by then")
    served.add_argument("--run-timeout", type=float, metavar="S", help="fail a job that has run for so long")
    served.add_argument("--retention", type=float, metavar="S", help="keep the job and its outputs for so long")
    local = parser.add_argument_group("on this machine")
    local.add_argument("--enforce-eager", action="store_true", help=ALWAYS["--enforce-eager"])
    for option in _offline_options():
        action = "append" if option.pairs else "store"
        local.add_argument(option.flag, type=_setting(option), action=action, help=option.help.replace("%", "%%"))


def _sampling(parser: argparse.ArgumentParser) -> None:
    sampling = parser.add_argument_group("sampling (default: as the model says)")
    sampling.add_argument("--negative-prompt", metavar="TEXT", help="what to steer away from; '' counts")
    sampling.add_argument("--steps", "--num-inference-steps", type=int, help="denoise steps")
    sampling.add_argument("--guidance-scale", type=float, metavar="X", help="embedded guidance of distilled models")
    sampling.add_argument("--true-cfg-scale", type=float, metavar="X", help="classifier-free guidance, above 1")
    sampling.add_argument(
        "--guidance-norm", type=_guidance_norm, choices=list(GuidanceNorm), help="length of the result"
    )
    sampling.add_argument("--guidance-rescale", type=float, metavar="X", help="share rescaled, from 0 to 1")
    sampling.add_argument("--guidance-start", type=float, metavar="X", help="guide from this fraction of the steps")
    sampling.add_argument("--guidance-end", type=float, metavar="X", help="guide until before this fraction")
    sampling.add_argument(
        "--true-cfg-scale-2", type=float, metavar="X", help="the same for a second expert (default: the same)"
    )
    seeds = sampling.add_mutually_exclusive_group()
    seeds.add_argument("--seed", type=int, help="seed of output 0; output i uses seed + i (default: at random)")
    seeds.add_argument("--seeds", type=_seeds, metavar="N,N,...", help="one seed for each output")
    sampling.add_argument("--num-outputs", type=int, metavar="N", help="outputs to make")
    sampling.add_argument("--scheduler", metavar="NAME", help="one of the model's schedulers, by its name in diffusers")
    sampling.add_argument(
        "--adapter",
        dest="loras",
        action="append",
        type=_adapter,
        metavar="NAME[=SCALE]",
        help="a LoRA adapter that is loaded; repeatable",
    )
    sampling.add_argument(
        "--extra", action="append", type=_extra, metavar="NAME=JSON", help="a parameter of this model; repeatable"
    )


def _image(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--width", type=int, help="pixels")
    parser.add_argument("--height", type=int, help="pixels")


def _edit(parser: argparse.ArgumentParser) -> None:
    _image(parser)
    parser.add_argument(
        "--image",
        "--image-path",
        dest="images",
        action="append",
        type=Path,
        required=True,
        metavar="FILE",
        help="repeatable, in order",
    )
    parser.add_argument("--mask", type=Path, metavar="FILE", help="white is made anew, black is kept")
    parser.add_argument("--strength", type=float, metavar="X", help="how much becomes noise, from 0 to 1")
    parser.add_argument("--layers", type=int, metavar="N", help="take the image apart into so many")
    parser.add_argument("--task", type=_task, choices=list(Task), help="(default: by the inputs)")


def _video(parser: argparse.ArgumentParser) -> None:
    _image(parser)
    parser.add_argument("--first-frame", type=Path, metavar="FILE", help="image that the video starts with")
    parser.add_argument("--last-frame", type=Path, metavar="FILE", help="image that the video ends with")
    parser.add_argument("--source-video", type=Path, metavar="FILE", help="video to start from")
    parser.add_argument(
        "--reference-image", dest="reference_images", action="append", type=Path, metavar="FILE", help="repeatable"
    )
    parser.add_argument("--control-video", type=Path, metavar="FILE", help="poses, depth or edges to follow")
    parser.add_argument("--mask-video", type=Path, metavar="FILE", help="white is made anew, black is kept")
    parser.add_argument("--audio", type=Path, metavar="FILE", help="sound that drives the video")
    parser.add_argument("--strength", type=float, metavar="X", help="how much becomes noise, from 0 to 1")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--num-frames", type=int, metavar="N", help="frames to make")
    length.add_argument("--duration", type=float, metavar="S", help="seconds; takes the nearest number of frames")
    parser.add_argument("--fps", type=float, metavar="X", help="frames per second to generate for")
    parser.add_argument("--output-fps", type=float, metavar="X", help="frames per second of the file")
    parser.add_argument("--task", type=_task, choices=list(Task), help="(default: by the inputs)")


def _audio(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--text", metavar="TEXT", help="words to be sung or spoken")
    parser.add_argument("--reference", type=Path, metavar="FILE", help="sound to start from")
    parser.add_argument("--strength", type=float, metavar="X", help="how much becomes noise, from 0 to 1")
    parser.add_argument("--start", type=float, metavar="S", help="where in the whole piece the clip begins")
    parser.add_argument("--duration", type=float, metavar="S", help="seconds")
    parser.add_argument("--sample-rate", type=int, metavar="HZ", help="samples per second of the file")


COMMANDS: tuple[Command, ...] = (
    Command(
        name="generate",
        help="make images, on a server or on this machine",
        method="generate_image",
        offline="generate",
        formats=ImageFormat,
        extensions=EXTENSIONS,
        arguments=_image,
        fields=("width", "height"),
    ),
    Command(
        name="edit",
        help="make images from images",
        method="edit_image",
        offline="edit_image",
        formats=ImageFormat,
        extensions=EXTENSIONS,
        arguments=_edit,
        fields=("width", "height", "images", "mask", "strength", "layers", "task"),
    ),
    Command(
        name="video",
        help="make videos from a prompt, images, a video or a sound",
        method="generate_video",
        offline="generate_video",
        formats=VideoFormat,
        extensions=VIDEO_EXTENSIONS,
        arguments=_video,
        fields=(
            "width", "height", "first_frame", "last_frame", "source_video", "reference_images", "control_video",
            "mask_video", "audio", "strength", "num_frames", "duration", "fps", "output_fps", "task",
        ),
    ),
    Command(
        name="audio",
        help="make sound",
        method="generate_audio",
        offline="generate_audio",
        formats=AudioFormat,
        extensions=AUDIO_EXTENSIONS,
        arguments=_audio,
        fields=("text", "reference", "strength", "start", "duration", "sample_rate"),
    ),
)  # fmt: skip


def _offline_options() -> Iterator[Option]:
    """The settings of a worker, which a running server has already decided."""
    sections = ("model", "adapter", "cache", "quantization", "loras", "offload")
    return (o for o in options() if o.section in sections and o.name not in ("model", "served_model_name"))


def _setting(option: Option) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return option.parse(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key, value


def _extra(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if equals and name:
        with contextlib.suppress(json.JSONDecodeError):
            return name, json.loads(value)
    raise argparse.ArgumentTypeError(f"{text!r} is not NAME=JSON, as in max_sequence_length=256 or style='\"bold\"'")


def _adapter(text: str) -> tuple[str, float]:
    name, equals, scale = text.partition("=")
    with contextlib.suppress(ValueError):
        if name:
            return name, float(scale) if equals else 1.0
    raise argparse.ArgumentTypeError(f"{text!r} is not NAME or NAME=SCALE, as in sketch=0.8")


def _seeds(text: str) -> tuple[int, ...]:
    with contextlib.suppress(ValueError):
        return tuple(int(part) for part in text.split(","))
    raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers, as in 1,2,3")


def _format(kind: type[T]) -> Callable[[str], T]:
    return lambda text: _member(kind, "JPEG" if text.upper() == "JPG" else text)


def _guidance_norm(text: str) -> GuidanceNorm:
    return _member(GuidanceNorm, text)


def _task(text: str) -> Task:
    return _member(Task, text.replace("-", "_"))


def _member(kind: type[T], text: str) -> T:
    with contextlib.suppress(ValueError):
        return kind(text.upper())
    raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(kind)}")
