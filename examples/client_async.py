"""Makes several images at once with asyncio, and takes up a job again that another client made.

python examples/client_async.py localhost:50051 out
"""

import asyncio

from omni_grpc.client import AsyncClient
from omni_grpc.config.command_line import Parser

PROMPTS = ("a red circle", "a blue square", "a green triangle")


async def main(address: str, stem: str) -> None:
    async with AsyncClient(address) as client:
        # side by side: the server takes their steps together
        results = await asyncio.gather(
            *(client.generate_image(prompt, width=128, height=128, steps=4, seed=7) for prompt in PROMPTS)
        )
        for number, result in enumerate(results):
            result.save(f"{stem}-{number}.png")

        # a job that outlives this client: anybody who knows its id can watch it, or fetch its images
        job = await client.create_job("a yellow star", width=128, height=128, steps=4, labels={"example": "async"})
        async for event in client.watch_job(job.job_id):
            print(f"{event.seq} {event.WhichOneof('event')}")
        result = await client.watch_job(job.job_id).result()
        result.save(f"{stem}-{len(PROMPTS)}.png")
    print(f"{len(PROMPTS) + 1} images, seeds {[one.seeds[0] for one in (*results, result)]}")


if __name__ == "__main__":
    parser = Parser(description=__doc__)
    parser.add_argument("address", metavar="HOST:PORT", help="of a server")
    parser.add_argument("stem", metavar="STEM", help="the images to write are STEM-0.png and so on")
    args = parser.parse_args()
    asyncio.run(main(args.address, args.stem))
