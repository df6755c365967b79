"""`python -m omni_grpc bench serve`: the command line of load tests."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omni_grpc.cli import connect
from omni_grpc.cli.bench.serve import arrivals, report
from omni_grpc.cli.bench.serve.measures import Objectives
from omni_grpc.cli.bench.serve.mix import MixClass, Shared, default_prompts, mix, mix_file
from omni_grpc.cli.bench.serve.plot import check_plot, plot
from omni_grpc.cli.bench.serve.runner import How, LoadConnection
from omni_grpc.cli.bench.serve.session import Plan, Point, Session, interruptible, provenance, server_info
from omni_grpc.cli.bench.serve.slo import LENGTHS, TIMES, Slo, slo
from omni_grpc.cli.bench.serve.trace import read_trace
from omni_grpc.cli.printing import print_table
from omni_grpc.cli.requests import chosen_model, option_pair
from omni_grpc.cli.signals import Terminated
from omni_grpc.client import Reconnect, Retry
from omni_grpc.config.command_line import Parser
from omni_grpc.types.errors import ConfigError, OmniError, Violation
from omni_grpc.types.output_files import check_writable, write_file
from omni_grpc.types.request_options import ALL, IMAGE
from omni_grpc.v1.model_pb2 import ListModelsRequest

SECONDS, RATE, TARGET, FIRST = 30.0, 1.0, 0.95, 0.5
"""What holds where the command line does not say it; FIRST is the first rate of a search."""
DESCRIPTION = "Sends requests to a running server, and measures how long they take and how many keep their objectives."
EPILOG = (
    "Requests are sent when they are due, however long those before them take (an open loop), unless --concurrency is "
    "given; latencies count from when they were due. Ctrl-C ends the run, cancels what runs, and prints what there is. "
    "Exit codes: 0 measured, 1 an error or --target not reached, 2 a wrong command line, 130 Ctrl-C."
)


def add(commands: Any) -> None:
    """Adds the command to the subparsers of `bench`."""
    parser: Parser = commands.add_parser(
        "serve", help="send load to a running server", description=DESCRIPTION, epilog=EPILOG
    )
    parser.set_defaults(run=lambda args, flags: run(args, parser))
    connect.add_server(parser)
    parser.add_argument("--model", help="model of the server (default: its only one)")
    _load_arguments(parser)
    _request_arguments(parser)
    parser.add_argument(
        "--slo",
        type=slo,
        default=Slo({}),
        metavar="NAME=TIME,...",
        help=f"objectives of a request, for example e2e=10s,first_event=200ms; names: {', '.join((*TIMES, *LENGTHS))}",
    )
    parser.add_argument(
        "--target", type=_share, help=f"share of the requests that is to keep them, 0 to 1 (--saturate: {TARGET:g})"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of arrivals and mix; request i has seed + i")
    parser.add_argument(
        "--warmup", type=_whole, default=1, metavar="N", help="requests of each class before (default: 1)"
    )
    parser.add_argument(
        "--timeout", type=_above_0, default=600.0, metavar="S", help="seconds that a request may take (default: 600)"
    )
    parser.add_argument(
        "--retries",
        type=_whole,
        default=0,
        metavar="N",
        help="send a request again that the server has no room for, when it says so (default: 0: it has failed)",
    )
    parser.add_argument(
        "--sample",
        type=_above_0,
        default=0.5,
        metavar="S",
        help="seconds between looks at the server's load (default: 0.5)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures and requests to this file")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw a PNG; needs the extra `plot`")
    parser.add_argument("--quiet", action="store_true", help="no line for each rate as it ends")


def _load_arguments(parser: argparse.ArgumentParser) -> None:
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--rate", type=_above_0, help=f"mean requests per second (default: {RATE:g})")
    how.add_argument("--rates", type=_rates, metavar="R,R,...", help="one run for each of these rates")
    how.add_argument(
        "--saturate",
        type=_above_0,
        nargs="?",
        const=FIRST,
        metavar="FIRST",
        help=f"search for the highest rate that keeps --slo, from this one on (default: {FIRST:g})",
    )
    how.add_argument("--concurrency", type=_count, metavar="N", help="closed loop: so many requests at any time")
    how.add_argument(
        "--trace", type=Path, metavar="FILE", help="CSV or JSON lines, each with `time` and a class or options"
    )
    parser.add_argument("--arrivals", choices=arrivals.KINDS, help="how requests come at a rate (default: poisson)")
    parser.add_argument(
        "--bursts",
        type=arrivals.bursts,
        metavar="ON/OFF",
        help="seconds with requests and without, for --arrivals bursts (default: 5/15)",
    )
    parser.add_argument("--speed", type=_above_0, metavar="X", help="--trace: so many times as fast (default: 1)")
    parser.add_argument("--precision", type=_above_0, metavar="X", help="--saturate: down to this share (default: 0.1)")
    parser.add_argument(
        "--duration", type=_above_0, metavar="S", help=f"seconds in which requests are sent (default: {SECONDS:g})"
    )
    parser.add_argument("--requests", type=_count, metavar="N", help="requests at most, of each run")


def _request_arguments(parser: argparse.ArgumentParser) -> None:
    classes = parser.add_mutually_exclusive_group()
    classes.add_argument(
        "--mix",
        type=mix,
        metavar="WxH:STEPS:WEIGHT,...",
        help="classes of requests, for example 512x512:20:3,1024x1024:30:1",
    )
    classes.add_argument("--mix-file", type=Path, metavar="FILE", help="classes of requests in YAML, with any options")
    parser.add_argument("--kind", choices=ALL, default=IMAGE, help="what is made without --mix-file (default: image)")
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="prompts, one a line (default: captions of shapes)"
    )
    parser.add_argument(
        "--set",
        action="append",
        type=option_pair,
        metavar="NAME=VALUE",
        help='an option of all requests, as JSON or text, such as steps=20 or loras={"name": 1}; repeatable',
    )


def run(args: argparse.Namespace, parser: Parser) -> int:
    """Runs the load test and returns the exit code. Raises the OmniError that ended it, KeyboardInterrupt where a
    signal did; what was measured until then has been printed and written.
    """
    plan = _plan(args, parser)
    if args.json is not None:
        check_writable(args.json)
    if args.plot is not None:
        check_plot()
        check_writable(args.plot)
    return asyncio.run(_measure(args, plan))


def _plan(args: argparse.Namespace, parser: Parser) -> Plan:
    _refuse_without(args, parser)
    classes: list[MixClass] = args.mix or (mix_file(args.mix_file) if args.mix_file else [])
    shared = Shared(kind=args.kind, prompts=_prompts(args), options=dict(args.set or ()))
    classes = [shared.completed(klass) for klass in classes or [MixClass(name="all")]]
    trace = None
    if args.trace is not None:
        trace = read_trace(args.trace, classes, args.speed or 1.0)
        own = [shared.completed(klass) for klass in trace.classes]
        classes = [klass for klass in [*classes, *own] if klass.name in trace.names]
    if args.saturate is not None and not args.slo.limits and not any(klass.slo for klass in classes):
        parser.error("--saturate needs --slo: what is to be kept, for example --slo e2e=10s")
    seconds = args.duration if args.requests is not None or args.duration is not None else SECONDS
    return Plan(
        classes=classes,
        process=arrivals.Process(kind=args.arrivals or arrivals.POISSON, bursts=args.bursts or arrivals.Bursts(5, 15)),
        trace=trace,
        concurrency=args.concurrency,
        saturate=args.saturate,
        rates=args.rates or ([args.rate or RATE] if _paced(args) and args.saturate is None else []),
        precision=args.precision or 0.1,
        seconds=None if trace else seconds,
        most=args.requests,
        objectives=Objectives(run=args.slo, classes={klass.name: klass.slo for klass in classes if klass.slo}),
        target=args.target or TARGET,
        warmup=args.warmup,
        interval=args.sample,
        seed=args.seed,
        how=How(timeout=args.timeout, retry=Retry(attempts=args.retries)),
    )


def _paced(args: argparse.Namespace) -> bool:
    return args.concurrency is None and args.trace is None


def _refuse_without(args: argparse.Namespace, parser: Parser) -> None:
    """Refuses flags that would have no effect, by name."""
    for flag, value, works, needs in (
        ("--arrivals", args.arrivals, _paced(args), "a rate: it has no effect with --concurrency or --trace"),
        ("--bursts", args.bursts, args.arrivals == arrivals.BURSTS, "--arrivals bursts"),
        ("--speed", args.speed, args.trace is not None, "--trace"),
        ("--precision", args.precision, args.saturate is not None, "--saturate"),
        ("--duration", args.duration, args.trace is None, "a rate or --concurrency: a trace is as long as it is"),
        ("--requests", args.requests, args.trace is None, "a rate or --concurrency: a trace is as long as it is"),
    ):
        if value is not None and not works:
            parser.error(f"{flag} needs {needs}")
    if args.kind != IMAGE and args.mix_file is not None:
        parser.error("--kind has no effect with --mix-file: each of its classes has a kind")


def _prompts(args: argparse.Namespace) -> tuple[str, ...]:
    if args.prompts is None:
        return default_prompts()
    try:
        lines = args.prompts.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise _refused("prompts", f"{args.prompts} is not text in UTF-8 (byte {error.start})") from error
    if not (found := tuple(line.strip() for line in lines if line.strip())):
        raise _refused("prompts", f"{args.prompts} has no lines")
    return found


async def _measure(args: argparse.Namespace, plan: Plan) -> int:
    connection = LoadConnection(args.server, Reconnect(), Retry(attempts=0), **connect.credential_options(args))
    try:
        models = await connection.unary(connection.models.ListModels, ListModelsRequest())
        model = chosen_model(list(models.models), args.model)
        about = provenance(await server_info(connection), model, args.server)
        session = Session(connection, model, plan, lambda point: _tell(args, point))
        async with interruptible(session.stop) as came:
            await session.run()
    finally:
        await connection.close()
    content = about | {
        "load": _load(args, plan),
        "interrupted": bool(came),
        "points": [point.as_dict() for point in session.points],
        "saturation": session.saturation,
    }
    _print(session)
    _write(args, content)
    if came:
        raise Terminated(came[0])
    return _exit_code(args, session)


def _tell(args: argparse.Namespace, point: Point) -> None:
    if not args.quiet:
        print(*report.lines(point), sep="\n", file=sys.stderr, flush=True)


def _print(session: Session) -> None:
    points = session.points
    if len(points) == 1:
        found = points[0].summary
        tables = [report.times(found), report.classes(found)]
    else:
        tables = [report.curve([point.as_dict() for point in points])] if points else []
    for number, (head, *rows) in enumerate(tables):
        if number:
            print()
        print_table(head, rows)
    if session.saturation is not None:
        print(report.saturation(session.saturation))


def _write(args: argparse.Namespace, content: dict[str, Any]) -> None:
    if args.json is not None:
        text = json.dumps(content) + "\n"
        try:
            write_file(args.json, text.encode())
        except OmniError as error:
            print(text)
            error.add_note("the figures are on stdout instead")
            raise
    if args.plot is not None and content["points"]:
        title = f"{content['model']['name']}, {content['server']['device']}"
        write_file(args.plot, plot({"": content["points"]}, title))


def _load(args: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    """What was sent: all that `compare` holds against another run."""
    return {
        "arrivals": plan.process.kind if plan.trace is None and plan.concurrency is None else None,
        "bursts": [plan.process.bursts.on, plan.process.bursts.off] if plan.process.kind == arrivals.BURSTS else None,
        "trace": None if args.trace is None else args.trace.name,
        "concurrency": plan.concurrency,
        "seconds": plan.seconds,
        "most": plan.most,
        "slo": dict(plan.objectives.run.limits),
        "classes": [klass.as_dict() for klass in plan.classes],
        "seed": plan.seed,
        "warmup": plan.warmup,
        "timeout": plan.how.timeout,
        "retries": plan.how.retry.attempts,
    }


def _exit_code(args: argparse.Namespace, session: Session) -> int:
    if session.saturation is not None:
        return 0 if session.saturation["rate"] is not None else 1
    shares = [point.summary["attainment"] or 0.0 for point in session.points]
    if args.target is not None and min(shares, default=0.0) < args.target:
        print(f"--target {args.target:g} was not reached: {min(shares, default=0.0):.1%}", file=sys.stderr)
        return 1
    return 0


# --- types of flags ---------------------------------------------------------------------------------------------------


def _above_0(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1")
    return value


def _whole(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def _rates(text: str) -> Sequence[float]:
    rates = [_above_0(part) for part in text.split(",")]
    if len(set(rates)) < len(rates):
        raise argparse.ArgumentTypeError(f"{text} has a rate twice")
    return rates


def _refused(field: str, why: str) -> ConfigError:
    return ConfigError(f"{field}: {why}", violations=(Violation(field, why),))
