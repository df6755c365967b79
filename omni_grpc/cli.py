"""`omni-grpc` and `python -m omni_grpc`: generate images, look after jobs, start a server.

Exit codes: 0 done, 1 an error (one line on stderr), 2 a wrong command line, 130 interrupted. Results go to stdout,
progress and errors to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import enum
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from omni_grpc import doctor, serve
from omni_grpc.client import Client, ImageOptions, ImageResult
from omni_grpc.client.events import event as read_event
from omni_grpc.client.messages import state_name
from omni_grpc.client.progress import describe, progress_display, warning_line
from omni_grpc.client.result import EXTENSIONS, write_files
from omni_grpc.config import Option, options
from omni_grpc.errors import OmniError
from omni_grpc.omni import Generation, Omni
from omni_grpc.request import Draft, GuidanceDraft, GuidanceNorm, ImageFormat
from omni_grpc.v1.event_pb2 import JobState
from omni_grpc.v1.model_pb2 import Model, ModelState
from omni_grpc.v1.sampling_pb2 import Task
from omni_grpc.version import __version__

T = TypeVar("T", bound=enum.StrEnum)

DEFAULT_SERVER = "localhost:50051"
INTERRUPTED = 130
SERVER_ONLY = ("request_id", "label", "timeout", "priority", "queue_timeout", "run_timeout", "retention")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["serve"]:
        return int(serve.main(arguments[1:]))
    args = _parser().parse_args(arguments)
    try:
        code: int = args.run(args)
    except OmniError as error:
        _complain(error)
        return 1
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as interrupt:
        print("interrupted", *getattr(interrupt, "__notes__", ()), sep="\n", file=sys.stderr)
        return INTERRUPTED
    return code


# --- generate ---------------------------------------------------------------------------------------------------------


def _generate(args: argparse.Namespace) -> int:
    suffix = args.out.suffix.lower()
    if args.format is None and suffix not in EXTENSIONS:
        args.parser.error(
            f"--out {args.out}: unknown extension {suffix!r}; use one of {', '.join(EXTENSIONS)}, or give --format"
        )
    if not args.out.parent.is_dir():
        args.parser.error(f"--out {args.out}: there is no folder {args.out.parent}")
    chosen = args.format or EXTENSIONS[suffix]
    if EXTENSIONS.get(suffix, chosen) is not chosen:
        print(f"warning: {args.out} will hold {chosen}, as --format says", file=sys.stderr)
    offline = args.server is None and args.model is not None and Path(args.model).is_dir()
    _refuse_options(args, offline)
    made = _generate_here(args, chosen) if offline else _generate_there(args, chosen)
    paths = write_files(made.files, args.out)
    if args.json:
        print(json.dumps(_record(made, paths)))
        return 0
    if args.quiet:
        for warning in made.warnings:
            print(warning_line(warning), file=sys.stderr)
    size, steps = f"{made.effective.width} x {made.effective.height}", made.effective.steps
    for path, seed in zip(paths, made.seeds, strict=True):
        print(f"{path}  {size}  seed {seed}  {steps} steps  {made.stats.total:.2f} s")
    return 0


def _refuse_options(args: argparse.Namespace, offline: bool) -> None:
    """No option is passed over in silence: some have a meaning only with a server, some only without."""
    names = SERVER_ONLY if offline else tuple(option.name for option in _offline_options())
    for name in names:
        if getattr(args, name) is not None:
            why = "has no effect without a server" if offline else "is a setting of the server, which is running"
            args.parser.error(f"--{name.replace('_', '-')} {why}")


def _generate_there(args: argparse.Namespace, chosen: ImageFormat) -> ImageResult:
    asked = ImageOptions(
        negative_prompt=args.negative_prompt,
        width=args.width,
        height=args.height,
        steps=args.steps,
        guidance_scale=args.guidance_scale,
        true_cfg_scale=args.true_cfg_scale,
        guidance_norm=args.guidance_norm,
        guidance_rescale=args.guidance_rescale,
        guidance_start=args.guidance_start,
        guidance_end=args.guidance_end,
        seed=args.seed,
        seeds=args.seeds,
        num_outputs=args.num_outputs,
        output_format=chosen,
        request_id=args.request_id,
        labels=dict(args.label or ()),
        priority=args.priority,
        queue_timeout=args.queue_timeout,
        run_timeout=args.run_timeout,
        retention=args.retention,
    )
    try:
        with Client(args.server or DEFAULT_SERVER) as client:
            return client.generate_image(
                args.prompt, model=args.model, progress=not args.quiet, timeout=args.timeout, **asked
            )
    except OmniError as error:
        if args.server is None and args.model is not None:
            error.add_note(f"{args.model} is no folder on this machine, so the server at {DEFAULT_SERVER} was asked")
        raise


def _generate_here(args: argparse.Namespace, chosen: ImageFormat) -> Generation:
    settings = {option.name: getattr(args, option.name) for option in _offline_options()}
    if not args.quiet:
        print(f"loading {args.model}", file=sys.stderr)
    given = {name: value for name, value in settings.items() if value is not None}
    with Omni(args.model, **given) as omni, progress_display(not args.quiet) as show:
        draft = Draft(
            model=omni.checkpoint.name,
            prompt=args.prompt,
            negative_prompt=args.negative_prompt,
            width=args.width,
            height=args.height,
            steps=args.steps,
            guidance=GuidanceDraft(
                scale=args.guidance_scale,
                true_cfg_scale=args.true_cfg_scale,
                norm=args.guidance_norm,
                rescale=args.guidance_rescale,
                interval_start=args.guidance_start,
                interval_end=args.guidance_end,
            ),
            seeds=args.seeds or (() if args.seed is None else (args.seed,)),
            num_outputs=args.num_outputs,
            output_format=chosen,
        )
        return omni.run(draft, show)


def _record(made: ImageResult | Generation, paths: list[Path]) -> dict[str, Any]:
    return {
        "job_id": made.job_id if isinstance(made, ImageResult) else None,
        "files": [str(path) for path in paths],
        "seeds": made.seeds,
        "effective": dataclasses.asdict(made.effective),
        "warnings": [dataclasses.asdict(warning) for warning in made.warnings],
        "stats": dataclasses.asdict(made.stats),
    }


# --- jobs and models --------------------------------------------------------------------------------------------------


def _models(args: argparse.Namespace) -> int:
    with Client(args.server) as client:
        models = client.list_models()
    if args.json:
        _print_json([_as_dict(model) for model in models])
        return 0
    _table(("MODEL", "STATE", "FAMILY", "TASKS", "SIZE", "STEPS"), [_model_row(model) for model in models])
    return 0


def _model_row(model: Model) -> tuple[str, ...]:
    return (
        model.name,
        ModelState.Name(model.state).removeprefix("MODEL_STATE_"),
        model.family,
        ", ".join(Task.Name(task).removeprefix("TASK_") for task in model.tasks),
        f"{model.limits.default_width} x {model.limits.default_height}",
        str(model.defaults.steps),
    )


def _jobs(args: argparse.Namespace) -> int:
    with Client(args.server) as client:
        jobs = client.list_jobs(states=args.state or (), labels=dict(args.label or ()), limit=args.limit)
    if args.json:
        _print_json([_as_dict(job) for job in jobs])
        return 0
    rows = [
        (
            job.job_id,
            state_name(job.state),
            job.model,
            f"{job.step}/{job.total_steps}",
            job.create_time.ToDatetime().isoformat(" ", "seconds"),
        )
        for job in jobs
    ]
    _table(("JOB", "STATE", "MODEL", "STEP", "CREATED (UTC)"), rows)
    return 0


def _watch(args: argparse.Namespace) -> int:
    with Client(args.server) as client, client.watch_job(args.job_id, args.after_seq) as stream:
        for message in stream:
            event = read_event(message)
            if args.json:
                print(json.dumps(_as_dict(message)), flush=True)
            else:
                line = message.WhichOneof("event") if event is None else describe(event)
                print(f"{message.seq:>5}  {line}", flush=True)
        if stream.error is not None:
            raise stream.error
    return 0


def _cancel(args: argparse.Namespace) -> int:
    with Client(args.server) as client:
        job = client.cancel_job(args.job_id, args.reason)
    print(f"{job.job_id}  {state_name(job.state)}")
    return 0


def _download(args: argparse.Namespace) -> int:
    with Client(args.server) as client:
        data = client.download(args.artifact_id)
    args.out.write_bytes(data)
    print(f"{args.out}  {len(data)} bytes")
    return 0


def _doctor(args: argparse.Namespace) -> int:
    return doctor.main()


# --- output -----------------------------------------------------------------------------------------------------------


def _complain(error: OmniError) -> None:
    """One line with the code, the reason and what to do; below it what the message does not say already."""
    failure = error.failure
    lines = [f"error: {failure.code} {failure.reason}: {' '.join(failure.message.split())}"]
    lines += [f"  {v.field}: {v.description}" for v in failure.violations if v.description not in failure.message]
    if failure.retry_after is not None:
        lines.append(f"  retry after {failure.retry_after:g} s")
    lines += [f"  {note}" for note in getattr(error, "__notes__", ())]
    print(*lines, sep="\n", file=sys.stderr)


def _as_dict(message: Message) -> dict[str, Any]:
    return MessageToDict(message, preserving_proto_field_name=True)


def _print_json(content: Any) -> None:
    print(json.dumps(content, indent=2))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    for row in (head, *rows):
        print("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


# --- the command line -------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="omni-grpc", description="Diffusion models over gRPC, step by step.")
    parser.add_argument("--version", action="version", version=f"omni-grpc {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    generate = commands.add_parser("generate", help="make images, on a server or on this machine")
    generate.set_defaults(run=_generate, parser=generate)
    _generate_arguments(generate)

    models = commands.add_parser("models", help="list the models of a server")
    models.set_defaults(run=_models)
    _server_arguments(models)
    models.add_argument("--json", action="store_true", help="print JSON")

    jobs = commands.add_parser("jobs", help="list jobs, newest first")
    jobs.set_defaults(run=_jobs)
    _server_arguments(jobs)
    states = [name.removeprefix("JOB_STATE_") for name in JobState.keys()[1:]]
    jobs.add_argument("--state", action="append", type=str.upper, choices=states, help="only this state; repeatable")
    jobs.add_argument("--label", action="append", type=_label, metavar="KEY=VALUE", help="only jobs with this label")
    jobs.add_argument("--limit", type=int, default=50, help="most jobs to list (default: 50)")
    jobs.add_argument("--json", action="store_true", help="print JSON")

    watch = commands.add_parser("watch", help="follow a job to its end")
    watch.set_defaults(run=_watch)
    _server_arguments(watch)
    watch.add_argument("job_id", metavar="JOB_ID")
    watch.add_argument("--after-seq", type=int, default=0, help="leave out the events up to this one (default: 0)")
    watch.add_argument("--json", action="store_true", help="print one JSON object per event")

    cancel = commands.add_parser("cancel", help="stop a job")
    cancel.set_defaults(run=_cancel)
    _server_arguments(cancel)
    cancel.add_argument("job_id", metavar="JOB_ID")
    cancel.add_argument("--reason", default="", help="comes back in the job's last event")

    download = commands.add_parser("download", help="fetch an output")
    download.set_defaults(run=_download)
    _server_arguments(download)
    download.add_argument("artifact_id", metavar="ARTIFACT_ID")
    download.add_argument("--out", type=Path, required=True, metavar="FILE", help="where to write it")

    commands.add_parser("doctor", help="show versions, devices and ops").set_defaults(run=_doctor)
    commands.add_parser("serve", help="start a server (same as python -m omni_grpc.serve)", add_help=False)
    return parser


def _server_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--server", default=DEFAULT_SERVER, metavar="HOST:PORT", help=f"server to ask (default: {DEFAULT_SERVER})"
    )


def _generate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", help="what to make")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="several outputs get -0, -1... appended"
    )
    parser.add_argument("--server", metavar="HOST:PORT", help=f"server to ask (default: {DEFAULT_SERVER})")
    parser.add_argument(
        "--model",
        help="a model of the server (default: its only one); without --server, a checkpoint folder runs here",
    )
    sampling = parser.add_argument_group("sampling (default: as the model says)")
    sampling.add_argument("--negative-prompt", metavar="TEXT", help="what to steer away from; '' counts")
    sampling.add_argument("--width", type=int, help="pixels")
    sampling.add_argument("--height", type=int, help="pixels")
    sampling.add_argument("--steps", type=int, help="denoise steps")
    sampling.add_argument("--guidance-scale", type=float, metavar="X", help="embedded guidance of distilled models")
    sampling.add_argument("--true-cfg-scale", type=float, metavar="X", help="classifier-free guidance, above 1")
    sampling.add_argument(
        "--guidance-norm", type=_guidance_norm, choices=list(GuidanceNorm), help="length of the result"
    )
    sampling.add_argument("--guidance-rescale", type=float, metavar="X", help="share rescaled, from 0 to 1")
    sampling.add_argument("--guidance-start", type=float, metavar="X", help="guide from this fraction of the steps")
    sampling.add_argument("--guidance-end", type=float, metavar="X", help="guide until before this fraction")
    seeds = sampling.add_mutually_exclusive_group()
    seeds.add_argument("--seed", type=int, help="seed of output 0; output i uses seed + i (default: at random)")
    seeds.add_argument("--seeds", type=_seeds, metavar="N,N,...", help="one seed for each output")
    sampling.add_argument("--num-outputs", type=int, metavar="N", help="images to make")
    parser.add_argument(
        "--format",
        type=_image_format,
        choices=list(ImageFormat),
        help="encoding (default: by the extension of --out)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    served = parser.add_argument_group("with a server")
    served.add_argument("--request-id", metavar="ID", help="idempotency key (default: a new UUID4)")
    served.add_argument("--label", action="append", type=_label, metavar="KEY=VALUE", help="label of the job")
    served.add_argument("--timeout", type=float, metavar="S", help="give up, and cancel, after this many seconds")
    served.add_argument("--priority", type=int, metavar="N", help="higher runs first")
    served.add_argument("--queue-timeout", type=float, metavar="S", help="fail a job that has not started by then")
    served.add_argument("--run-timeout", type=float, metavar="S", help="fail a job that has run for so long")
    served.add_argument("--retention", type=float, metavar="S", help="keep the job and its outputs for so long")
    local = parser.add_argument_group("on this machine")
    for option in _offline_options():
        local.add_argument(option.flag, type=option.type, choices=option.choices or None, help=option.help)


def _offline_options() -> Iterator[Option]:
    """The settings of a worker, which a running server has already decided."""
    return (o for o in options() if o.section == "model" and o.name not in ("model", "served_model_name"))


def _label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key, value


def _seeds(text: str) -> tuple[int, ...]:
    with contextlib.suppress(ValueError):
        return tuple(int(part) for part in text.split(","))
    raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers, as in 1,2,3")


def _image_format(text: str) -> ImageFormat:
    return _member(ImageFormat, "JPEG" if text.upper() == "JPG" else text)


def _guidance_norm(text: str) -> GuidanceNorm:
    return _member(GuidanceNorm, text)


def _member(kind: type[T], text: str) -> T:
    with contextlib.suppress(ValueError):
        return kind(text.upper())
    raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(kind)}")


if __name__ == "__main__":
    sys.exit(main())
