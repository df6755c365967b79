"""A process with an engine, one replica in an actor and a Ray of its own, which says where they are and waits."""

import asyncio
import json
import sys

from tests.ray.test_replicas import pids, running


async def main() -> None:
    async with running(None, data_parallel_size=1) as engine:
        said = {"actor": pids(engine)[0], "folder": engine._replicas[0].executor._local._folder}
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()
        await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(main())
