"""Times the streaming of blocks to the device against a plain copy of as much: the ceiling; and how they are loaded.

    python benchmarks/bench_host.py             the GPU where there is one, else the CPU

A block has as many bytes as one of Qwen-Image in bfloat16. `busy` is streaming while each block computes for half as
long as it takes to come. `layers` is what streaming replaces: a copy for each tensor, into memory that is allocated for
it.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from omni_grpc.config.command_line import Parser
from omni_grpc.ops.host import Reading, Region, Streamer, streamer

LAYERS = (*(3 * 3072 * 3072,) * 2, *(3072 * 3072,) * 2, *(4 * 3072 * 3072,) * 4, *(6 * 3072 * 3072,) * 2)
"""Elements of the weights of a block of Qwen-Image (https://huggingface.co/Qwen/Qwen-Image): 340 million."""

BLOCKS, ROUNDS = 8, 3


@dataclasses.dataclass(frozen=True)
class Measurement:
    what: str
    gigabytes: float
    seconds: float | None
    problem: str = ""

    @property
    def gb_per_s(self) -> float | None:
        return None if self.seconds is None else self.gigabytes / self.seconds


def measure(device: torch.device, layers: Sequence[int], blocks: int, *, seconds: float) -> list[Measurement]:
    deadline = time.monotonic() + seconds
    measurements: list[Measurement] = []

    def add(what: str, size: int, call: Callable[[], float]) -> float | None:
        taken, problem = None, "no time left"
        if time.monotonic() < deadline:
            try:
                taken, problem = call(), ""
            except Exception as error:  # noqa: BLE001 - the other measurements still count
                problem = f"{type(error).__name__}: {error}"
        measurements.append(Measurement(what, size / 1e9, taken, problem))
        return taken

    size = 2 * sum(layers)
    add("layers", 2 * size, lambda: _by_layers(device, layers))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    regions = [_region(layers) for _ in range(blocks)]
    add("fill", size, lambda: _fill(regions[0]))
    for other in regions[1:]:
        other.whole.fill_(1)
    add("pin", blocks * size, lambda: _clock(lambda: [region.pin(device) for region in regions]))
    memory = [torch.empty(regions[0].used, dtype=torch.uint8, device=device) for _ in range(3)]
    ceiling = add("copy", size, lambda: _copy(memory[0], regions))
    for slots in (2, 3):
        add(f"stream {slots}", blocks * size, lambda slots=slots: _stream(memory[:slots], regions, lambda: None))
    if ceiling is not None:
        work = _work(device, ceiling / 2)
        add("busy 2", blocks * size, lambda: _stream(memory[:2], regions, work))
    return measurements


def gpu(seconds: float) -> list[Measurement]:
    return measure(torch.device("cuda"), LAYERS, BLOCKS, seconds=seconds)


def _region(layers: Sequence[int]) -> Region:
    region = Region(sum(2 * elements + 256 for elements in layers))
    for elements in layers:
        region.take((elements,), torch.bfloat16)
    return region


def _clock(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _fill(region: Region) -> float:
    """From a file that the system has in memory."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "block")
        with file.open("wb") as stream:
            stream.truncate(region.used)
            for _ in range(0, region.used, 1 << 24):
                stream.write(bytes(min(1 << 24, region.used - stream.tell())))
        file.read_bytes()
        reading = Reading()
        reading.add(file, 0, region.whole)
        return _clock(reading.run)


def _copy(target: Tensor, regions: Sequence[Region]) -> float:
    return statistics.median(
        _clock(lambda region=region: target.copy_(region.whole, non_blocking=True)) for region in regions
    )


def _stream(memory: Sequence[Tensor], regions: Sequence[Region], work: Callable[[], None]) -> float:
    """Seconds of all blocks in turns, as an offloaded stack takes them."""
    device, slots = memory[0].device, len(memory)
    copies: Streamer = streamer(device, slots)
    for slot in range(slots):
        copies.release(slot)
    turns = len(regions) * ROUNDS

    def copy(turn: int) -> None:
        source = regions[turn % len(regions)].whole
        copies.copy(turn % slots, memory[turn % slots], source)

    def run() -> None:
        for turn in range(slots - 1):
            copy(turn)
        for turn in range(turns):
            if turn + slots - 1 < turns:
                copy(turn + slots - 1)
            copies.wait(turn % slots)
            work()
            copies.release(turn % slots)

    return _clock(run) / ROUNDS


def _work(device: torch.device, seconds: float) -> Callable[[], None]:
    if device.type == "cuda":
        cycles = int(seconds * 1.5e9)
        return lambda: torch.cuda._sleep(cycles)
    return lambda: time.sleep(seconds)


def _by_layers(device: torch.device, layers: Sequence[int]) -> float:
    pinned = device.type == "cuda"
    hosts = [[torch.empty(elements, dtype=torch.bfloat16, pin_memory=pinned) for elements in layers] for _ in range(2)]

    def run() -> None:
        for tensors in hosts:
            there = [tensor.to(device, non_blocking=True, copy=True) for tensor in tensors]
            del there

    run()
    return statistics.median(_clock(run) for _ in range(5))


def table(measurements: Sequence[Measurement]) -> str:
    lines = [f"{'what':>10} {'GB':>7} {'s':>8} {'GB/s':>7} {'of copy':>8}"]
    ceiling = next((m.gb_per_s for m in measurements if m.what == "copy"), None)
    for m in measurements:
        if m.seconds is None or m.gb_per_s is None:
            lines.append(f"{m.what:>10} {m.problem}")
            continue
        of_copy = f"{m.gb_per_s / ceiling:8.1%}" if ceiling and m.what not in ("fill", "pin") else f"{'-':>8}"
        lines.append(f"{m.what:>10} {m.gigabytes:7.2f} {m.seconds:8.4f} {m.gb_per_s:7.1f} {of_copy}")
    return "\n".join(lines)


def main() -> None:
    parser = Parser(description="time the streaming of blocks against a plain copy")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    if device == "cuda":
        print(table(gpu(600)))
    else:
        print(table(measure(torch.device("cpu"), [elements // 16 for elements in LAYERS], BLOCKS, seconds=600)))


if __name__ == "__main__":
    main()
