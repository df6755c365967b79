"""Makes the dashboard for Grafana, deploy/grafana/dashboard.json, from the panels that are declared here.

python -m tools.grafana_dashboard --write    writes the file
python -m tools.grafana_dashboard --check    exit code 1 where the file is another one
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tools.conformance_table import ROOT

FILE = ROOT / "deploy" / "grafana" / "dashboard.json"
COLUMNS = 24
SOURCE: Mapping[str, str] = {"type": "prometheus", "uid": "${datasource}"}
AT = 'instance=~"$instance"'
OF = f'{AT}, model=~"$model"'
RATE = "$__rate_interval"
CACHED = "omni_grpc_step_cache_rows_total"


@dataclasses.dataclass(frozen=True, slots=True)
class Panel:
    """A panel: its title, its unit by Grafana's name, and expressions with the legend of each. `about` explains it."""

    title: str
    unit: str
    lines: Sequence[tuple[str, str]]
    about: str = ""
    kind: str = "timeseries"
    width: int = 8
    height: int = 8
    stacked: bool = False


def rate(metric: str, by: str, labels: str = OF) -> str:
    return f"sum by ({by}) (rate({metric}{{{labels}}}[{RATE}]))"


def quantile(q: float, metric: str, by: str, labels: str = OF) -> str:
    more = f"le, {by}" if by else "le"
    return f"histogram_quantile({q:g}, sum by ({more}) (rate({metric}_bucket{{{labels}}}[{RATE}])))"


def ratio(metric: str, over: str, by: str, labels: str = OF, more: str = "") -> str:
    """Of two rates. `more`: labels of the first one alone."""
    return f"{rate(metric, by, labels + more)} / {rate(over, by, labels)}"


def mean(metric: str, by: str = "model", labels: str = OF) -> str:
    return ratio(metric + "_sum", metric + "_count", by, labels)


def stat(title: str, unit: str, expression: str, about: str = "") -> Panel:
    return Panel(title, unit, [(expression, "")], about, kind="stat", width=4, height=4)


def quantiles(metric: str, by: str, labels: str = OF) -> list[tuple[str, str]]:
    legend = f"{{{{{by}}}}} " if by else ""
    return [(quantile(q, metric, by, labels), f"{legend}{q * 100:g} %") for q in (0.5, 0.95, 0.99)]


ROWS: Mapping[str, Sequence[Panel]] = {
    "Overview": (
        stat("Models that take jobs", "none", f'sum(omni_grpc_model_state{{{OF}, state=~"READY|ASLEEP"}})'),
        stat("Jobs that wait", "none", f"sum(omni_grpc_queue_jobs{{{OF}}})"),
        stat("Jobs that run", "none", f"sum(omni_grpc_running_jobs{{{OF}}})"),
        stat(
            "Jobs that fail",
            "percentunit",
            f'sum(rate(omni_grpc_jobs_total{{{OF}, state="FAILED"}}[15m])) / '
            f"sum(rate(omni_grpc_jobs_total{{{OF}}}[15m]))",
            "Over the last 15 minutes.",
        ),
        stat("Predicted wait", "s", f"max(omni_grpc_queue_delay_seconds{{{OF}}})", "Of a job that is made now."),
        stat("Open streams", "none", f"sum(omni_grpc_open_streams{{{AT}}})"),
        Panel("Jobs that end", "ops", [(rate("omni_grpc_jobs_total", "state"), "{{state}}")], stacked=True),
        Panel(
            "Calls",
            "reqps",
            [(rate("omni_grpc_rpcs_total", "stack", AT), "{{stack}}")],
            stacked=True,
        ),
        Panel("Time of a job", "s", quantiles("omni_grpc_job_stage_seconds", "model", f'{OF}, stage="total"')),
    ),
    "Queue": (
        Panel(
            "Jobs by model",
            "none",
            [
                (f"sum by (model) (omni_grpc_queue_jobs{{{OF}}})", "{{model}} waiting"),
                (f"sum by (model) (omni_grpc_running_jobs{{{OF}}})", "{{model}} running"),
            ],
        ),
        Panel("Time in the queue", "s", quantiles("omni_grpc_job_stage_seconds", "model", f'{OF}, stage="queue"')),
        Panel(
            "Predicted wait and work",
            "s",
            [
                (f"max by (model) (omni_grpc_queue_delay_seconds{{{OF}}})", "{{model}} wait"),
                (f"sum by (model) (omni_grpc_work_seconds{{{OF}}})", "{{model}} work"),
            ],
            "Work: the predicted time of all steps that jobs have still to take.",
        ),
        Panel(
            "Jobs by tenant",
            "none",
            [(f"sum by (tenant, state) (omni_grpc_tenant_jobs{{{AT}}})", "{{tenant}} {{state}}")],
            "The tenants with the most jobs, and the others as one.",
            stacked=True,
        ),
        Panel(
            "Mean time by stage",
            "s",
            [(mean("omni_grpc_job_stage_seconds", "stage", f'{OF}, stage!="total"'), "{{stage}}")],
            stacked=True,
        ),
        Panel("Outputs", "ops", [(rate("omni_grpc_outputs_total", "model, kind"), "{{model}} {{kind}}")]),
    ),
    "Steps": (
        Panel("Time of a forward", "s", quantiles("omni_grpc_step_duration_seconds", "model")),
        Panel(
            "What shares a forward",
            "none",
            [
                (mean("omni_grpc_step_requests"), "{{model}} requests"),
                (mean("omni_grpc_step_rows"), "{{model}} rows"),
            ],
        ),
        Panel(
            "Measured over predicted time",
            "none",
            [
                (
                    ratio("omni_grpc_step_measured_seconds_total", "omni_grpc_step_predicted_seconds_total", "model"),
                    "{{model}}",
                ),
                (f"avg by (model) (omni_grpc_step_cost_ratio{{{OF}}})", "{{model}} running mean"),
            ],
            "1 where the cost model is right.",
        ),
        Panel("Steps", "ops", [(rate("omni_grpc_steps_total", "model"), "{{model}}")]),
        Panel("Pixels moved by a step", "pixels/s", [(rate("omni_grpc_step_pixels_total", "model"), "{{model}}")]),
        Panel("Tokens", "tokens/s", [(rate("omni_grpc_step_tokens_total", "model"), "{{model}}")]),
        Panel(
            "Rows that the step cache served",
            "percentunit",
            [
                (
                    ratio(CACHED, CACHED, "model, component", more=', result="hit"'),
                    "{{model}} {{component}}",
                )
            ],
        ),
        Panel(
            "CUDA graphs",
            "ops",
            [
                (rate("omni_grpc_cuda_graph_replays_total", "model"), "{{model}} launches"),
                (rate("omni_grpc_cuda_graph_captures_total", "model"), "{{model}} captures"),
            ],
        ),
        Panel(
            "How models are executed",
            "none",
            [(f"omni_grpc_model_info{{{OF}}}", "")],
            kind="table",
        ),
    ),
    "Memory": (
        Panel(
            "Devices",
            "percentunit",
            [
                (
                    f"omni_grpc_device_memory_used_bytes{{{OF}}} / omni_grpc_device_memory_size_bytes{{{OF}}}",
                    "{{instance}} {{model}} {{replica}}.{{rank}} {{device}}",
                )
            ],
        ),
        Panel(
            "Host memory",
            "bytes",
            [
                (f"omni_grpc_worker_resident_memory_bytes{{{OF}}}", "worker {{model}} {{replica}}.{{rank}}"),
                (f"process_resident_memory_bytes{{{AT}}}", "server {{instance}}"),
            ],
        ),
        Panel(
            "Store",
            "bytes",
            [
                (f"sum by (kind) (omni_grpc_store_bytes{{{AT}}})", "{{kind}}"),
                (f"sum by (kind) (omni_grpc_store_budget_bytes{{{AT}}})", "{{kind}} at most"),
            ],
        ),
        Panel(
            "On their way",
            "bytes",
            [
                (f"sum by (instance) (omni_grpc_shared_memory_bytes{{{AT}}})", "{{instance}} shared memory"),
                (f"sum by (instance) (omni_grpc_input_bytes{{{AT}}})", "{{instance}} inputs"),
            ],
        ),
        Panel("Rows of the store", "none", [(f"max by (kind) (omni_grpc_store_rows{{{AT}}})", "{{kind}}")]),
        Panel("Outputs written", "Bps", [(rate("omni_grpc_output_bytes_total", "model"), "{{model}}")]),
    ),
    "Errors": (
        Panel(
            "Jobs that fail, by reason",
            "ops",
            [(rate("omni_grpc_jobs_total", "reason", OF + ', state="FAILED"'), "{{reason}}")],
            stacked=True,
        ),
        Panel("Refusals", "reqps", [(rate("omni_grpc_refusals_total", "reason", AT), "{{reason}}")], stacked=True),
        Panel(
            "Restarts of workers",
            "none",
            [(f"sum by (model, cause) (increase(omni_grpc_worker_restarts_total{{{OF}}}[1h]))", "{{model}} {{cause}}")],
            "In the last hour.",
        ),
        Panel(
            "Calls that end with an error",
            "reqps",
            [(rate("omni_grpc_rpcs_total", "code", AT + ', code!~"OK|GONE"'), "{{code}}")],
            stacked=True,
        ),
        Panel("Requests that break", "ops", [(rate("omni_grpc_broken_requests_total", "phase"), "{{phase}}")]),
        Panel(
            "The store",
            "none",
            [
                (f"min by (instance) (omni_grpc_store_writable{{{AT}}})", "{{instance}} writable"),
                (f"sum by (instance) (omni_grpc_store_unwritten_jobs{{{AT}}})", "{{instance}} jobs to be written"),
            ],
        ),
    ),
    "Watchers": (
        Panel("Time from event to watcher", "s", quantiles("omni_grpc_watch_lag_seconds", "", AT)),
        Panel(
            "Events",
            "ops",
            [
                (rate("omni_grpc_watch_events_total", "instance", AT), "{{instance}} sent"),
                (rate("omni_grpc_watch_coalesced_events_total", "instance", AT), "{{instance}} left out"),
            ],
        ),
        Panel("How late the event loop is", "s", quantiles("omni_grpc_event_loop_lag_seconds", "", AT)),
        Panel("Open calls", "none", [(f"sum by (instance) (omni_grpc_open_calls{{{AT}}})", "{{instance}}")]),
        Panel("Webhooks", "ops", [(rate("omni_grpc_webhook_attempts_total", "outcome", AT), "{{outcome}}")]),
        Panel("Webhooks that are owed", "none", [(f"max(omni_grpc_webhooks_owed{{{AT}}})", "owed")]),
    ),
}


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        panels.append(_placed({"type": "row", "title": title, "collapsed": False, "panels": []}, 0, y, COLUMNS, 1))
        x, y = 0, y + 1
        height = 0
        for panel in row:
            if x + panel.width > COLUMNS:
                x, y, height = 0, y + height, 0
            panels.append(_placed(_panel(panel), x, y, panel.width, panel.height))
            x, height = x + panel.width, max(height, panel.height)
        y += height
    for number, panel in enumerate(panels, 1):
        panel["id"] = number
    return {
        "uid": "omni-grpc",
        "title": "omni_grpc",
        "tags": ["omni-grpc"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": _variables()},
        "annotations": {"list": []},
        "panels": panels,
    }


def _placed(panel: dict[str, Any], x: int, y: int, width: int, height: int) -> dict[str, Any]:
    return {**panel, "gridPos": {"x": x, "y": y, "w": width, "h": height}}


def _panel(panel: Panel) -> dict[str, Any]:
    table = panel.kind == "table"
    targets = [
        {
            "refId": chr(ord("A") + number),
            "datasource": dict(SOURCE),
            "expr": expression,
            "legendFormat": legend or "__auto",
            **({"format": "table", "instant": True} if table else {}),
        }
        for number, (expression, legend) in enumerate(panel.lines)
    ]
    custom = {"fillOpacity": 10, "stacking": {"mode": "normal"}} if panel.stacked else {}
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": dict(SOURCE),
        "targets": targets,
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}} if panel.kind == "timeseries" else {},
    }


def _variables() -> list[dict[str, Any]]:
    several = {"multi": True, "includeAll": True, "current": {"text": "All", "value": "$__all"}, "refresh": 2}
    query = {"type": "query", "datasource": dict(SOURCE), "sort": 1, **several}
    models = f"label_values(omni_grpc_model_state{{{AT}}}, model)"
    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        {"name": "instance", "label": "Server", "query": "label_values(omni_grpc_build_info, instance)", **query},
        {"name": "model", "label": "Model", "query": models, **query},
    ]


def text() -> str:
    """The file."""
    return json.dumps(dashboard(), indent=1) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true", help="write the file")
    action.add_argument("--check", action="store_true", help="exit with 1 where the file is another one")
    if parser.parse_args().write:
        FILE.parent.mkdir(parents=True, exist_ok=True)
        FILE.write_text(text(), encoding="utf-8")
    elif FILE.read_text(encoding="utf-8") != text():
        print(f"{FILE.relative_to(ROOT)} is not current: run python -m tools.grafana_dashboard --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
