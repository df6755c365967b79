"""Dashboard, rules and alerts: they name metrics and labels that there are, and do what they say."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from omni_grpc.telemetry.declared import METRICS, OF_THE_PROCESS, Kind
from tools import grafana_dashboard
from tools.conformance_table import ROOT

PROMETHEUS = ROOT / "deploy" / "prometheus"
TESTS = Path(__file__).parent / "alerts_test.yml"
promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")

FUNCTIONS = {
    "sum", "min", "max", "avg", "rate", "increase", "histogram_quantile", "min_over_time", "label_values", "by", "on",
    "and", "or",
}  # fmt: skip
OF_PROMETHEUS = {"up"}
EVERYWHERE = {"job", "instance", "le"}
"""Labels that Prometheus adds, and that of buckets."""


def rules() -> Iterator[dict]:
    for file in sorted(PROMETHEUS.glob("*.yml")):
        for group in yaml.safe_load(file.read_text(encoding="utf-8"))["groups"]:
            yield from group["rules"]


RULES = list(rules())
DASHBOARD = grafana_dashboard.dashboard()
TARGETS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
QUERIES = [one["query"] for one in DASHBOARD["templating"]["list"] if one["type"] == "query"]
EXPRESSIONS = [*(rule["expr"] for rule in RULES), *TARGETS, *QUERIES]
RECORDED = {rule["record"] for rule in RULES if "record" in rule}


def series() -> dict[str, set[str]]:
    """Every name that a sample may have, with its labels."""
    known: dict[str, set[str]] = {name: set() for name in (*OF_THE_PROCESS, *OF_PROMETHEUS)}
    for metric in METRICS:
        suffixes = ("_bucket", "_sum", "_count") if metric.kind is Kind.HISTOGRAM else ("",)
        known |= {metric.name + suffix: set(metric.labels) for suffix in suffixes}
    return known | {name: {label for metric in METRICS for label in metric.labels} for name in RECORDED}


SERIES = series()


def names_in(expression: str) -> set[str]:
    """The metrics that an expression reads."""
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\b(by|on) \([^)]*\)|, \w+\)$", " ", expression)
    return set(re.findall(r"[a-zA-Z_:][\w:]*", bare)) - FUNCTIONS


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_reads_metrics_and_labels_that_there_are(expression: str) -> None:
    names = names_in(expression)
    assert names, expression
    assert names <= SERIES.keys(), names - SERIES.keys()
    for name, matchers in re.findall(r"([a-zA-Z_:][\w:]*)\{([^}]*)\}", expression):
        used = set(re.findall(r"(\w+) ?[!=]~?", re.sub(r'"[^"]*"', "", matchers)))
        assert used <= SERIES[name] | EVERYWHERE, f"{name} has no {used - SERIES[name]}"
    for _, labels in re.findall(r"\b(by|on) \(([^)]*)\)", expression):
        known = set.union(EVERYWHERE, *(SERIES[name] for name in names))
        assert set(labels.split(", ")) <= known


def test_what_is_recorded_is_used_or_shown_by_no_more_than_one_name() -> None:
    assert len(RECORDED) == sum("record" in rule for rule in RULES)
    assert all(re.fullmatch(r"omni_grpc:\w+:\w+", name) for name in RECORDED)


@pytest.mark.parametrize("rule", [rule for rule in RULES if "alert" in rule], ids=lambda rule: rule["alert"])
def test_an_alert_says_what_is_wrong_and_what_to_do(rule: dict) -> None:
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert set(rule["annotations"]) == {"summary", "action"}


def test_the_dashboard_is_that_of_its_declarations() -> None:
    assert grafana_dashboard.FILE.read_text(encoding="utf-8") == grafana_dashboard.text(), (
        "run python -m tools.grafana_dashboard --write"
    )
    assert json.loads(grafana_dashboard.text()) == DASHBOARD


def test_panels_lie_side_by_side_and_have_what_grafana_needs() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        here = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not here & cells, panel["title"]
        assert at["x"] + at["w"] <= 24
        cells |= here
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert [one["name"] for one in DASHBOARD["templating"]["list"]] == ["datasource", "instance", "model"]
    rows = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert rows == ["Overview", "Queue", "Steps", "Memory", "Errors", "Watchers"]


@promtool
def test_promtool_reads_the_rules_and_every_expression_of_the_dashboard(tmp_path: Path) -> None:
    plain = [re.sub(r"\$__rate_interval", "5m", expression) for expression in TARGETS]
    recorded = [{"record": f"panel:{number}", "expr": expression} for number, expression in enumerate(plain)]
    file = tmp_path / "dashboard.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": recorded}]}), encoding="utf-8")
    files = [str(file), *map(str, sorted(PROMETHEUS.glob("*.yml")))]
    done = subprocess.run(["promtool", "check", "rules", *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@promtool
def test_alerts_fire_when_they_should_and_not_before() -> None:
    done = subprocess.run(["promtool", "test", "rules", str(TESTS)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
