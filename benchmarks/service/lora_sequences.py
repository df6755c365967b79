"""Random sequences of loading, generating, unloading and cancelling with LoRA adapters, from several clients at once.

What must hold: every image is the one of a server that was started with these adapters, within 1 of 255 in each value
(who shares a step with whom is a matter of chance), and every call ends as it should. Each client has names of its own,
under which it loads one file after another, so that it knows which file a name means; the caches have room for a few of
the files, and workers are killed on the way.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import io
import json
import os
import random
import signal
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
from numpy.typing import NDArray

from omni_grpc.checkpoint import sizes
from omni_grpc.client import AsyncClient
from omni_grpc.config.sections import BUNDLED
from omni_grpc.types.errors import OmniError
from omni_grpc.v1 import job_pb2

from .report import Result
from .server import Server, served

Pixels = NDArray[np.uint8]
Key = tuple[int, tuple[tuple[int, float], ...]]
"""What an image is made of: its seed, and files with their scales."""

RANK = 4
SCALES = (1.0, 0.5, -1.0)
OPTIONS: Mapping[str, Any] = {"steps": 3, "width": 64, "height": 64}
PROMPT = "a red circle left of a blue square"
COMMON = ("--device", "cpu", "--cpu-threads", "1", "--warm-up-seconds", "0")
CLOSE = 1
"""The most that a value may differ."""
LONGEST = 6
"""Calls of one sequence."""
LOST = frozenset({"WORKER_DIED", "MODEL_LOADING", "WORKER_RESTARTING"})
"""What a worker's death may end in."""
FULL = "LORA_CACHE_FULL"
"""What a job fails with where those that run leave no room for its adapters."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numbers:
    count: int = 500
    seed: int = 0
    clients: int = 6
    files: int = 6
    kills: int = 2
    """Of the worker, on the way."""
    cached: int = 6
    """Files for which the device cache has room."""


@dataclasses.dataclass
class Tally:
    """`differences`: the largest of each image that was compared; `calls`: (call, outcome) -> how often."""

    calls: collections.Counter[tuple[str, str]] = dataclasses.field(default_factory=collections.Counter)
    differences: list[int] = dataclasses.field(default_factory=list)
    exact: int = 0
    problems: list[str] = dataclasses.field(default_factory=list)
    sequences: int = 0


class Reference:
    """A server that has all files from its start. Its images are made once."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._made: dict[Key, asyncio.Task[Pixels]] = {}

    async def image(self, key: Key) -> Pixels:
        if key not in self._made:
            self._made[key] = asyncio.create_task(self._make(key))
        return await self._made[key]

    async def _make(self, key: Key) -> Pixels:
        seed, loras = key
        named: dict[str, float] = {}
        for file, scale in loras:
            # two names may mean the same file: their changes add up
            named[f"file{file}"] = named.get(f"file{file}", 0.0) + scale
        result = await self._client.generate_image(PROMPT, seed=seed, loras=named, **OPTIONS)
        return pixels(result.files[0])


class Player:
    """One client with two names of its own; `loaded` says which file each means."""

    def __init__(self, number: int, stage: Stage) -> None:
        self._stage = stage
        self._names = [f"c{number}-{letter}" for letter in "ab"]
        self._loaded: dict[str, int] = {}
        self._jobs: list[asyncio.Task[None]] = []
        """Those that nobody waits for yet."""

    async def play(self, rng: random.Random) -> None:
        """One sequence; all that it has begun has ended when this returns."""
        calls = [self._load, self._load, self._generate, self._generate, self._begin, self._cancel, self._unload]
        for _ in range(rng.randint(2, LONGEST)):
            await rng.choice([*calls, self._unknown])(rng)
        await asyncio.gather(*self._jobs)
        self._jobs.clear()

    # --- calls --------------------------------------------------------------------------------------------------------

    async def _load(self, rng: random.Random) -> None:
        name, file = rng.choice(self._names), rng.randrange(self._stage.numbers.files)
        before = self._loaded.get(name)
        reason = await self._called(
            "load", self._stage.client.admin.load_lora(name, "demo", path=str(self._stage.files[file]))
        )
        if before is not None and before != file:
            self._expect("load", reason, {"LORA_EXISTS"})
        elif self._expect("load", reason, {"", *LOST}) == "":
            self._loaded[name] = file

    async def _unload(self, rng: random.Random) -> None:
        name, how = rng.choice(self._names), rng.choice(({}, {"wait": 60.0}, {"force": True}))
        reason = await self._called(
            f"unload {next(iter(how), 'now')}", self._stage.client.admin.unload_lora(name, "demo", **how)
        )
        if name not in self._loaded:
            self._expect("unload", reason, {"LORA_NOT_FOUND"})
        elif self._expect("unload", reason, {""} | (set() if how else {"LORA_IN_USE"})) == "":
            del self._loaded[name]

    async def _generate(self, rng: random.Random) -> None:
        await self._made(rng, self._chosen(rng), set())

    async def _begin(self, rng: random.Random) -> None:
        """A job that goes on beside what comes next, such as the unloading of what it uses."""
        chosen = self._chosen(rng)
        job = await self._created(rng, chosen)
        if job is not None:
            done = self._ended(*job, chosen, {"LORA_UNLOADED"} if chosen else set())
            self._jobs.append(asyncio.create_task(done))

    async def _cancel(self, rng: random.Random) -> None:
        chosen = self._chosen(rng)
        job = await self._created(rng, chosen)
        if job is not None:
            await asyncio.sleep(rng.random() * 0.2)
            await self._called("cancel", self._stage.client.cancel_job(job[0].job_id))
            await self._ended(*job, chosen, {"JOB_CANCELLED"})

    async def _unknown(self, rng: random.Random) -> None:
        """A name that means nothing at the moment."""
        missing = [name for name in self._names if name not in self._loaded]
        if missing:
            reason = await self._called("name what is not there", self._create(0, {rng.choice(missing): 1.0}))
            self._expect("name what is not there", reason, {"INVALID_ARGUMENT", *LOST})

    # --- parts --------------------------------------------------------------------------------------------------------

    def _chosen(self, rng: random.Random) -> dict[str, float]:
        names = rng.sample(sorted(self._loaded), rng.randint(0, len(self._loaded)))
        return {name: rng.choice(SCALES) for name in names}

    async def _made(self, rng: random.Random, chosen: dict[str, float], also: set[str]) -> None:
        job = await self._created(rng, chosen)
        if job is not None:
            await self._ended(*job, chosen, also)

    async def _created(self, rng: random.Random, chosen: dict[str, float]) -> tuple[job_pb2.Job, Key] | None:
        seed = rng.randrange(3)
        key = (seed, tuple(sorted((self._loaded[name], scale) for name, scale in chosen.items())))
        found: list[job_pb2.Job] = []
        reason = await self._called("create", self._create(seed, chosen), found)
        return (found[0], key) if self._expect("create", reason, {"", *LOST}) == "" else None

    async def _create(self, seed: int, loras: Mapping[str, float]) -> job_pb2.Job:
        return await self._stage.client.create_job(PROMPT, seed=seed, loras=loras, **OPTIONS)

    async def _ended(self, job: job_pb2.Job, key: Key, chosen: Mapping[str, float], also: set[str]) -> None:
        client, tally = self._stage.client, self._stage.tally
        stream = client.watch_job(job.job_id)
        reason = await self._called("image", stream.result())
        if self._expect("image", reason, {"", FULL, *also, *LOST}) != "":
            return
        made = await client.get_job(job.job_id)
        found = pixels(await client.download(made.artifacts[0].artifact_id))
        expected = await self._stage.reference.image(key)
        difference = int(np.abs(found.astype(int) - expected.astype(int)).max())
        tally.differences.append(difference)
        tally.exact += difference == 0
        if difference > CLOSE:
            tally.problems.append(f"a wrong image: {job.job_id} of {key} ({dict(chosen)}) differs by {difference}")

    async def _called(self, call: str, coroutine: Any, found: list[Any] | None = None) -> str:
        """The reason of the refusal, "" for none."""
        try:
            value = await coroutine
        except OmniError as error:
            reason = error.failure.reason
        else:
            reason = ""
            if found is not None:
                found.append(value)
        self._stage.tally.calls[call, reason or "OK"] += 1
        return reason

    def _expect(self, call: str, reason: str, expected: set[str]) -> str:
        if reason not in expected:
            self._stage.tally.problems.append(f"{call}: {reason or 'OK'}, and not one of {sorted(expected)}")
        return reason


@dataclasses.dataclass
class Stage:
    """What all clients share."""

    numbers: Numbers
    files: list[Path]
    client: AsyncClient
    reference: Reference
    tally: Tally


def run(checkpoint: Path, numbers: Numbers | None = None) -> Result:
    """The bundled model is served, whatever `checkpoint` says: what is drawn does not matter, and it is small."""
    numbers = numbers or Numbers()
    with tempfile.TemporaryDirectory() as scratch:
        files = adapters(Path(scratch), numbers.files)
        tally = asyncio.run(_played(files, numbers))
    rows = [(call, outcome, str(count)) for (call, outcome), count in sorted(tally.calls.items())]
    compared = len(tally.differences)
    rows += [("images compared", f"{tally.exact} equal bit for bit", str(compared))]
    figures = {
        "numbers": dataclasses.asdict(numbers),
        "sequences": tally.sequences,
        "calls": {f"{call}: {outcome}": count for (call, outcome), count in sorted(tally.calls.items())},
        "images": compared,
        "images_equal": tally.exact,
        "largest_difference": max(tally.differences, default=0),
        "wrong_images": sum(difference > CLOSE for difference in tally.differences),
    }
    arguments = f"--count {numbers.count}" + (f" --seed {numbers.seed}" if numbers.seed else "")
    return Result(
        columns=("call", "outcome", "count"),
        rows=rows,
        figures=figures,
        problems=tally.problems,
        arguments=arguments,
    )


async def _played(files: list[Path], numbers: Numbers) -> Tally:
    named = [flag for number, path in enumerate(files) for flag in ("--lora", f"file{number}={path}")]
    cache = numbers.cached * files[0].stat().st_size
    roots = ("--lora-roots", str(files[0].parent))
    caches = ("--lora-device-cache", str(cache), "--lora-host-cache", str(2 * cache))
    tally = Tally()
    async with _clients(named, (*roots, *caches)) as (reference, client, server):
        stage = Stage(numbers, files, client, Reference(reference), tally)
        turns = iter(range(numbers.count))
        kills = {round((kill + 1) * numbers.count / (numbers.kills + 1)) for kill in range(numbers.kills)}

        async def play(number: int) -> None:
            player = Player(number, stage)
            for turn in turns:
                if turn in kills:
                    with contextlib.suppress(LookupError, ProcessLookupError):
                        os.kill(server.worker(), signal.SIGKILL)
                        tally.calls["kill", "OK"] += 1
                await player.play(random.Random(f"{numbers.seed}:{turn}"))
                tally.sequences += 1

        await asyncio.gather(*(play(number) for number in range(numbers.clients)))
    return tally


@contextlib.asynccontextmanager
async def _clients(named: list[str], flags: tuple[str, ...]) -> AsyncIterator[tuple[AsyncClient, AsyncClient, Server]]:
    with served(BUNDLED, *COMMON, *named) as first, served(BUNDLED, *COMMON, *flags) as second:
        async with AsyncClient(first.address) as reference, AsyncClient(second.address) as client:
            yield reference, client, second


def pixels(data: bytes) -> Pixels:
    return np.asarray(PIL.Image.open(io.BytesIO(data)))


def adapters(folder: Path, count: int) -> list[Path]:
    """Files of random adapters of the bundled model, no two of which draw the same."""
    layers = {
        name.removesuffix(".weight"): shape
        for file in sorted((BUNDLED / "transformer").glob("*.safetensors"))
        for name, (_, shape) in sizes.header(file).items()
        if name.endswith(".weight") and len(shape) == 2 and ".attn.to_" in name
    }
    paths = []
    for number in range(count):
        rng = np.random.default_rng(number)
        tensors = {}
        for name, (rows, columns) in layers.items():
            tensors[f"transformer.{name}.lora_A.weight"] = 0.15 * rng.standard_normal((RANK, columns))
            tensors[f"transformer.{name}.lora_B.weight"] = 0.15 * rng.standard_normal((rows, RANK))
        paths.append(folder / f"file{number}.safetensors")
        paths[-1].write_bytes(_safetensors(tensors))
    return paths


def _safetensors(tensors: Mapping[str, NDArray[Any]]) -> bytes:
    header, data = {}, b""
    for name, values in tensors.items():
        content = values.astype("<f4").tobytes()
        header[name] = {
            "dtype": "F32",
            "shape": list(values.shape),
            "data_offsets": [len(data), len(data) + len(content)],
        }
        data += content
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data
