"""Strikes by name; see the package's docstring."""

from __future__ import annotations

import sys
from pathlib import Path

from omni_grpc.config.command_line import Parser

from .. import report
from ..lives import COMMANDS, QUICK
from ..server import ROOT
from . import __doc__ as description
from .course import FAULTS, Numbers, measure


def main() -> int:
    """Exit code: 1 where something did not hold."""
    parser = Parser(description=description)
    parser.add_argument("--rounds", type=int, default=Numbers.rounds, help="how often each fault strikes")
    parser.add_argument("--only", action="append", default=[], choices=FAULTS, metavar="NAME", help=", ".join(FAULTS))
    parser.add_argument("--seconds", type=float, help="how long a fault lasts (default: its own)")
    parser.add_argument("--store", action="append", default=[], choices=("sqlite", "postgresql"), help="one alone")
    parser.add_argument("--worker", choices=COMMANDS, default=QUICK, help="without a model, or the bundled one")
    parser.add_argument("--seed", type=int, default=Numbers.seed)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the results file")
    options = parser.parse_args()
    numbers = Numbers(
        rounds=options.rounds,
        only=options.only,
        stores=options.store,
        seconds=options.seconds,
        worker=options.worker,
        seed=options.seed,
    )
    with report.load() as meanwhile:
        found = measure(numbers)
    arguments = " ".join(sys.argv[1:])
    path = report.write(options.out, "chaos", found, meanwhile, module=f"benchmarks.service.chaos {arguments}".rstrip())
    print(found.table())
    print(f"\n{meanwhile.seconds:.0f} s; other processes took {meanwhile.others:.2f} cores meanwhile; {path.name}")
    for problem in found.problems:
        print(f"PROBLEM: {problem}")
    return 1 if found.problems else 0


if __name__ == "__main__":
    sys.exit(main())
