"""Jobs per second of one replica and of two alone, for machines without the libraries of a store.

    python -m benchmarks.service.replica_speeds

A line of JSON for each kind of worker, see `replicas`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import statistics

from benchmarks.service.replicas import Numbers, _speeds
from omni_grpc.config.command_line import Parser
from tools.tiny.kept import kept_checkpoint


async def main() -> None:
    numbers = dataclasses.replace(Numbers(), rounds=3, seconds=6.0)
    real = dataclasses.replace(numbers.real, checkpoint=kept_checkpoint())
    for name, kind in (("quick", numbers.quick), ("real", real)):
        speeds = await _speeds(kind, numbers)
        one, two = (statistics.median(speeds[replicas]) for replicas in (1, 2))
        line = {"kind": name, "cores": os.cpu_count(), "jobs_per_second": speeds, "gain": round(two / one, 3)}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    Parser(prog="python -m benchmarks.service.replica_speeds", description=__doc__).parse_args()
    asyncio.run(main())
