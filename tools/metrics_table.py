"""Prints the table of metrics as Markdown, from `omni_grpc/telemetry/declared.py`.

python -m tools.metrics_table            prints it
python -m tools.metrics_table --write    puts it into docs/metrics.md
python -m tools.metrics_table --check    exit code 1 where docs/metrics.md has another one
"""

from __future__ import annotations

import argparse
import sys

from omni_grpc.telemetry.declared import GROUPS, OF_THE_PROCESS, Metric
from tools.conformance_table import ROOT, table, written

PAGE = ROOT / "docs" / "metrics.md"
NAME = "metrics"


def metrics() -> str:
    """A table for each group, and the list of what the library adds."""
    parts = [
        f"### {group}\n\n{table(['metric', 'labels', 'what it is', 'series at most'], map(_row, declared))}"
        for group, declared in GROUPS.items()
    ]
    names = ", ".join(f"`{name}`" for name in OF_THE_PROCESS)
    return "\n\n".join(("", *parts, f"### The process\n\nOf the server's own process: {names}.", ""))


def _row(metric: Metric) -> tuple[str, str, str, str]:
    where = f" Only {metric.when}." if metric.when else ""
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"`{metric.name}` ({metric.kind})", labels, metric.help + where, metric.bound or "1"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--write", action="store_true", help="write the table into docs/metrics.md")
    parser.add_argument("--check", action="store_true", help="exit with 1 where docs/metrics.md has another one")
    options = parser.parse_args()
    page = PAGE.read_text(encoding="utf-8")
    wanted = written(page, NAME, metrics())
    if options.write:
        PAGE.write_text(wanted, encoding="utf-8")
    elif options.check and wanted != page:
        print("docs/metrics.md is not current: run python -m tools.metrics_table --write")
        return 1
    elif not options.check:
        print(metrics())
    return 0


if __name__ == "__main__":
    sys.exit(main())
