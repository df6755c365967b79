"""Says which kernels a denoise step of bench_models.py is made of, and how much of it lies between them.

    python -m benchmarks.step_kernels "FLUX.1-dev=ours fp8" "Qwen-Image=ours bf16" ...     on a GPU

"host" is how long the host takes to launch a step, "total" the step, three times. Then, of one step under torch's
profiler: time and number of each kernel's calls, and the gaps between neighbours.
"""

from __future__ import annotations

import collections
import itertools
import re
import time

import torch

from benchmarks import provenance, timing
from benchmarks.bench_models import CASES, WAYS, Case, Step, Way, _ours
from omni_grpc.config.command_line import Parser

KERNELS, GAPS = 18, 16


def short(name: str) -> str:
    name = re.sub(r"void |\(anonymous namespace\)::|at::native::|omni::|cutlass::", "", name)
    if "nvjet" in name:
        return name[:44]
    if "GemmUniversal" in name or "device_kernelINS_4gemm" in name:
        return "our gemm"
    return "fa3" if "FlashAttn" in name else name[:60]


def times(step: Step) -> list[tuple[float, float]]:
    """Milliseconds of the host and in all."""
    made = []
    for _ in range(3):
        start = time.perf_counter()
        step()
        host = time.perf_counter() - start
        torch.cuda.synchronize()
        made.append((round(host * 1e3, 1), round((time.perf_counter() - start) * 1e3, 1)))
    return made


def pieces(step: Step) -> list[tuple[float, float, str]]:
    """Start, end and name of all that ran on the device, in microseconds."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    return sorted(
        (event.time_range.start, event.time_range.end, short(event.name))
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )


def report(ran: list[tuple[float, float, str]]) -> list[str]:
    kernels, gaps = collections.defaultdict(list), collections.defaultdict(list)
    for start, end, name in ran:
        kernels[name].append(end - start)
    for (_, end, before), (start, _, after) in itertools.pairwise(ran):
        gaps[before[:34], after[:34]].append(start - end)
    total, between = sum(map(sum, kernels.values())), sum(map(sum, gaps.values()))
    span = ran[-1][1] - ran[0][0]
    return [
        f"device {total / 1e3:.1f} ms in {len(ran)} pieces; span {span / 1e3:.1f} ms; gaps {between / 1e3:.1f} ms",
        *(
            f"{sum(taken) / 1e3:8.2f} ms {len(taken):5d} {name}"
            for name, taken in sorted(kernels.items(), key=lambda item: -sum(item[1]))[:KERNELS]
        ),
        "gaps:",
        *(
            f"{sum(taken) / 1e3:8.2f} ms {len(taken):5d} median {sorted(taken)[len(taken) // 2]:.1f} us  "
            f"{before} -> {after}"
            for (before, after), taken in sorted(gaps.items(), key=lambda item: -sum(item[1]))[:GAPS]
        ),
    ]


@torch.inference_mode()
def measure(case: Case, way: Way) -> None:
    step, _, _ = _ours(case, way)
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    print(f"# {case.name} {way.name} host/total ms {times(step)}", flush=True)
    print("\n".join(report(pieces(step))), flush=True)


def main() -> None:
    parser = Parser(description="list the kernels of a denoise step")
    parser.add_argument("steps", nargs="+", help="MODEL=WAY, as bench_models.py calls them")
    cases, ways = {case.name: case for case in CASES}, {way.name: way for way in WAYS}
    steps = [each.partition("=") for each in parser.parse_args().steps]
    timing.require_gpu()
    print(provenance.text("benchmarks/step_kernels.py"))
    for model, _, way in steps:
        measure(cases[model], ways[way])
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
