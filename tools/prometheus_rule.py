"""Makes the PrometheusRule of deploy/kubernetes from the rules and alerts of deploy/prometheus, so that they are one.

python -m tools.prometheus_rule --write    writes it
python -m tools.prometheus_rule --check    exits with 1 if it is not what --write would make
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("rules.yml", "alerts.yml")
TARGET = ROOT / "deploy" / "kubernetes" / "components" / "monitoring" / "prometheus-rule.yaml"
HEAD = "# generated from deploy/prometheus by python -m tools.prometheus_rule --write; do not edit\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="make the PrometheusRule of deploy/kubernetes", allow_abbrev=False)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true", help="write it")
    action.add_argument("--check", action="store_true", help="compare it with what would be written")
    options = parser.parse_args()
    text = made()
    if options.write:
        TARGET.write_text(text, encoding="utf-8")
        return 0
    if TARGET.read_text(encoding="utf-8") == text:
        return 0
    print(f"{TARGET.relative_to(ROOT)} is out of date: python -m tools.prometheus_rule --write")
    return 1


def made() -> str:
    """The text of the manifest."""
    groups = [
        group
        for name in SOURCES
        for group in yaml.safe_load((ROOT / "deploy" / "prometheus" / name).read_text(encoding="utf-8"))["groups"]
    ]
    manifest = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "omni-grpc"},
        "spec": {"groups": groups},
    }
    return HEAD + yaml.safe_dump(manifest, sort_keys=False, width=120)


if __name__ == "__main__":
    sys.exit(main())
