"""`omni-grpc jobs`: lists the newest jobs. The flags that select jobs are those of `jobs export` too."""

from __future__ import annotations

import argparse
from typing import Any

from omni_grpc.cli import connect
from omni_grpc.cli.generate import label
from omni_grpc.cli.printing import as_dict, print_json, print_table
from omni_grpc.cli.times import back
from omni_grpc.client.messages import JobFilters, state_name
from omni_grpc.v1.event_pb2 import JobState


def add(commands: Any) -> None:
    """Adds `jobs`."""
    jobs = commands.add_parser(
        "jobs",
        help="list jobs, newest first; `jobs export` writes all of them",
        epilog="`omni-grpc jobs export` writes all that fit, as JSON lines or CSV: `omni-grpc jobs export --help`.",
    )
    jobs.set_defaults(run=_list)
    connect.add_server(jobs)
    add_filters(jobs)
    jobs.add_argument("--limit", type=int, default=50, help="most jobs to list (default: 50)")
    jobs.add_argument("--json", action="store_true", help="print JSON")


def add_filters(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that select jobs."""
    states = [name.removeprefix("JOB_STATE_") for name in JobState.keys()[1:]]
    parser.add_argument(
        "--state", action="append", type=str.upper, choices=states, help="only jobs in this state; repeatable"
    )
    parser.add_argument(
        "--label",
        action="append",
        type=label,
        metavar="KEY=VALUE",
        help="only jobs with this label; repeatable, for jobs that have all of them",
    )
    parser.add_argument("--model", default="", help="only jobs of this model")
    parser.add_argument("--tenant", default="", help="only jobs of this tenant; with the scope admin, of any")
    parser.add_argument(
        "--created-from",
        type=back,
        metavar="WHEN",
        help="only jobs created then or later: 30d, 12h or 45m ago, or a date such as 2026-12-31 or "
        "2026-12-31T18:00:00Z (in UTC where it names no zone)",
    )
    parser.add_argument("--created-before", type=back, metavar="WHEN", help="only jobs created before then")


def filters(args: argparse.Namespace) -> JobFilters:
    """What the flags of `add_filters` select."""
    return JobFilters(
        states=args.state or (),
        labels=dict(args.label or ()),
        model=args.model,
        tenant=args.tenant,
        created_from=args.created_from,
        created_before=args.created_before,
    )


def _list(args: argparse.Namespace) -> int:
    with connect.connect(args) as client:
        jobs = client.list_jobs(limit=args.limit, **filters(args))
    if args.json:
        print_json([as_dict(job) for job in jobs])
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
    print_table(("JOB", "STATE", "MODEL", "STEP", "CREATED (UTC)"), rows)
    return 0
