"""Times one denoise step of full-size denoisers: Qwen-Image, FLUX.1-dev and one expert of Wan 2.2 A14B.

    python -m benchmarks.bench_models [--models Qwen-Image ...] [--seconds 200] [--results FOLDER]     on a GPU

Weights are random. Ours in bfloat16, with weights in 8 bits, and with attention in 8 bits too, by the features that
serve requests; each is compared with ours in bfloat16 on the same inputs (relative error of the prediction). Beside it
diffusers with its repeated blocks compiled, as it comes, with cuDNN's attention, with the best attention that is
installed, and where torchao is there with that's weights and activations in float8 by rows. A step is timed as a server
takes it, launches and all, with events around it; "device" is the same step from a CUDA graph, where it is short: what
the two differ by is what the device waits for the host. Ours has its modulation and its text's keys computed ahead, as
in a request.

The rows "in turns" are of one more run in which ours and diffusers with its best attention are in memory together, and
each repetition times both, the one and the other first: their times may be compared where the rows above drift. `runs`
has every repetition's milliseconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import FluxTransformer2DModel, QwenImageTransformer2DModel, WanTransformer3DModel
from torch import Tensor, nn

from benchmarks import timing, turns
from benchmarks.full_size import FLUX, QWEN, WAN
from omni_grpc.config import QuantizationConfig, roles
from omni_grpc.config.command_line import Parser
from omni_grpc.features import Context, Effects, attention, quant
from omni_grpc.models import flux, qwen_image, wan
from omni_grpc.models.flux.flux_transformer import FluxTransformer
from omni_grpc.models.qwen_image.qwen_image_transformer import QwenImageTransformer
from omni_grpc.models.wan.wan_transformer import WanTransformer
from omni_grpc.nn.linear import AnyLinear
from omni_grpc.nn.mesh import Mesh
from omni_grpc.nn.rows import MOD, LayoutCache, Row, Rows
from omni_grpc.types.spec import ModelSpec

DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16

BEST = "diffusers, best attention"
TURNS = ("ours bf16", "ours fp8, attention fp8")
REPETITIONS = 6
"""A multiple of the sides that take turns, so that each is first as often as the others."""
LONG = 1000.0
"""Milliseconds of a step that no host is too slow for."""

Step = Callable[[], Tensor]
Edit = Callable[[nn.Module, None, Context], None]
"""A feature without settings of its own."""
Change = Callable[[Any], object]
"""What is done to a module of diffusers: its precision, its attention, and how its blocks are compiled."""
Build = Callable[[], tuple[Step, Mapping[str, int], Mapping[str, Sequence[str]]]]
"""Makes a step, and says how many layers are in how many bits, and what each role's attention runs on."""


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """How ours computes: weights and attention in so many bits."""

    name: str
    quantization: str | None = None
    precision: str = "auto"


WAYS = (
    Way("ours bf16"),
    Way("ours fp8", "fp8"),
    Way("ours fp8, attention int8", "fp8", "int8"),
    Way("ours fp8, attention fp8", "fp8", "fp8"),
    Way("ours int8", "int8"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A denoiser: our module of it, a step of ours, and one of diffusers'; `steps` are timed."""

    name: str
    steps: int
    spec: ModelSpec
    build: Callable[[], nn.Module]
    ours: Callable[..., Step]
    theirs: Callable[[Change], Step]


@dataclasses.dataclass(frozen=True)
class Measurement:
    model: str
    what: str
    milliseconds: float | None
    device: float | None = None
    gib: float | None = None
    error: float | None = None
    layers: Mapping[str, int] = dataclasses.field(default_factory=dict)
    attention: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    problem: str = ""
    runs: Sequence[float] = ()


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=DTYPE)


def _fill(module: nn.Module, spec: ModelSpec) -> None:
    """Weights as those of a trained model spread: products keep the size of what goes in; norms are ones."""
    layers: dict[str, AnyLinear] = {}
    for path, part in module.named_modules():
        if isinstance(part, AnyLinear) and not _within(path, layers):
            layers[path] = part
    for path, layer in sorted(layers.items()):
        for name, shape in layer.shapes().items():
            std = shape[-1] ** -0.5 if name == "weight" else 0.02
            layer.load_tensor(name, (_random(*shape) * std).to(_dtype(f"{path}.{name}", spec)))
    for path, part in module.named_modules():
        if _within(path, layers):
            continue
        for name, parameter in list(part.named_parameters(recurse=False)):
            made = _random(*parameter.shape) * 0.02 + (parameter.dim() == 1 and name == "weight")
            made = made.to(_dtype(f"{path}.{name}", spec))
            setattr(part, name, nn.Parameter(made, requires_grad=False))


def _within(path: str, layers: Collection[str]) -> bool:
    return any(path == layer or path.startswith(f"{layer}.") for layer in layers)


def _dtype(name: str, spec: ModelSpec) -> torch.dtype:
    return torch.float32 if spec.weights["transformer"].in_float32(name) else DTYPE


def _built(
    case: Case, way: Way, ranks: Mesh | None = None, before: Sequence[Edit] = (), after: Sequence[Edit] = ()
) -> tuple[nn.Module, Effects]:
    """Our module with its features, and what these say of it: `before` there are weights, and `after` all others."""
    with torch.device("meta"):
        module = case.build().eval().requires_grad_(False)
    context = Context(component="transformer", spec=case.spec, device=DEVICE, dtype=DTYPE, ranks=ranks)
    for edit in before:
        edit(module, None, context)
    quant.apply(module, QuantizationConfig(quantization=way.quantization), context)
    torch.manual_seed(0)
    _fill(module, case.spec)
    attention.apply(module, roles.parse(None, {"default": {"precision": way.precision}}), context)
    for edit in after:
        edit(module, None, context)
    torch.manual_seed(1)
    return module, context.effects


def _ours(case: Case, way: Way) -> tuple[Step, Mapping[str, int], Mapping[str, Sequence[str]]]:
    module, effects = _built(case, way)
    used = {role: list(names) for role, names in effects.slots["attention"].items()}
    return case.ours(module), dict(effects.found.quantized_layers), used


def _bound(module: Any, rows: Rows, tables: Mapping[str, Tensor], rope: Tensor) -> None:
    """One evaluation of every row's modulation, and its rotary table."""
    for name, table in tables.items():
        rows.bind(name, MOD, [table[:1]] * len(rows))
    joint = "joint" if rows.layout.rows[0].joined == rows.layout.rows[0].names else "img"
    rows.bind("rope", joint, [rope] * len(rows))


def _rows(row: Row, count: int) -> Rows:
    """So many alike."""
    return Rows([(None, f"row {number}") for number in range(count)], [row] * count, LayoutCache(DEVICE))


def _qwen(module: QwenImageTransformer, text: int = 256, side: int = 64, *, count: int = 2) -> Step:
    """1024 x 1024; two rows are one output with and without the prompt."""
    rows = _rows(Row.of(txt=text, img=side * side), count)
    _bound(module, rows, module.modulation(_random(1)), module.rope(text, side, side))
    rows.bind("txt", "txt", [module.text(_random(text, 3584)) for _ in range(count)])
    latents = _random(count * side * side, 64)
    return lambda: module(latents, rows)


def _qwen_theirs(change: Change, text: int = 256, side: int = 64) -> Step:
    module = _theirs(QwenImageTransformer2DModel, QWEN, change)
    inputs = {
        "hidden_states": _random(2, side * side, 64),
        "encoder_hidden_states": _random(2, text, 3584),
        "timestep": torch.tensor([0.5, 0.5], device=DEVICE, dtype=DTYPE),
        "img_shapes": [[(1, side, side)]] * 2,
        "return_dict": False,
    }
    return lambda: module(**inputs)[0]


def _flux(
    module: FluxTransformer, text: int = 512, side: int = 64, config: Mapping[str, Any] = FLUX, *, count: int = 1
) -> Step:
    rows = _rows(Row.of(txt=text, img=side * side), count)
    pooled = _random(1, config["pooled_projection_dim"])
    _bound(module, rows, module.modulation(_random(1), pooled, 3.5), module.rope(text, (side, side)))
    rows.bind("txt", "txt", [module.text(_random(text, config["joint_attention_dim"])) for _ in range(count)])
    latents = _random(count * side * side, config["in_channels"])
    return lambda: module(latents, rows)


def _flux_theirs(change: Change, text: int = 512, side: int = 64) -> Step:
    module = _theirs(FluxTransformer2DModel, FLUX, change)
    inputs = {
        "hidden_states": _random(1, side * side, 64),
        "encoder_hidden_states": _random(1, text, 4096),
        "pooled_projections": _random(1, 768),
        "timestep": torch.tensor([0.5], device=DEVICE, dtype=DTYPE),
        "guidance": torch.tensor([3.5], device=DEVICE),
        "img_ids": torch.zeros(side * side, 3, device=DEVICE),
        "txt_ids": torch.zeros(text, 3, device=DEVICE),
        "return_dict": False,
    }
    return lambda: module(**inputs)[0]


def _wan(
    module: WanTransformer,
    text: int = 512,
    size: tuple[int, int, int] = (21, 30, 52),
    config: Mapping[str, Any] = WAN,
    *,
    count: int = 1,
) -> Step:
    """480 x 832, 81 frames: one forward of one of two experts, without guidance."""
    tokens = size[0] * size[1] * size[2]
    rows = _rows(Row.of(txt=text, img=tokens, aside=("txt",)), count)
    for name, (stream, tensor) in module.text(_random(text, config["text_dim"])).items():
        rows.bind(name, stream, [tensor] * count)
    _bound(module, rows, module.modulation(torch.tensor([500.0], device=DEVICE), DTYPE), module.rope(*size))
    latents = _random(count * tokens, config["in_channels"] * math.prod(config["patch_size"]))
    return lambda: module(latents, rows)


def _wan_theirs(
    change: Change,
    text: int = 512,
    size: tuple[int, int, int] = (21, 60, 104),
    config: Mapping[str, Any] = WAN,
) -> Step:
    module = _theirs(WanTransformer3DModel, config, change)
    inputs = {
        "hidden_states": _random(1, config["in_channels"], *size),
        "encoder_hidden_states": _random(1, text, config["text_dim"]),
        "timestep": torch.tensor([500], device=DEVICE),
        "return_dict": False,
    }
    return lambda: module(**inputs)[0]


def _theirs(kind: Any, config: Mapping[str, Any], change: Change) -> Any:
    """Their module, in DTYPE but for what they keep in float32, changed."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(DTYPE)
    try:
        with torch.device(DEVICE):
            module = kind(**config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(default)
    change(module)
    return module


def _compiled(module: Any, change: Change | None = None, whole: bool = True) -> None:
    """Changed, and then its repeated blocks compiled; `whole`: each as one graph."""
    if change is not None:
        change(module)
    module.compile_repeated_blocks(fullgraph=whole, dynamic=False)


def _float8(module: nn.Module, search: bool = False) -> None:
    """The linear layers of the blocks but for those of the modulation, as torchao has them. `search`: with the settings
    that torchao makes for torch.compile, which try many forms of each fused kernel.
    """
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_

    def served(part: nn.Module, path: str) -> bool:
        return isinstance(part, nn.Linear) and "blocks" in path and "mod" not in path and "norm" not in path

    config = Float8DynamicActivationFloat8WeightConfig(granularity=PerRow(), set_inductor_config=search)
    quantize_(module, config, filter_fn=served)


QUICK: Mapping[str, Change] = {
    "diffusers compiled": _compiled,
    "diffusers, cuDNN attention": functools.partial(
        _compiled, change=lambda module: module.set_attention_backend("_native_cudnn")
    ),
}
SLOW: Mapping[str, Change] = {
    "diffusers, torchao fp8": functools.partial(_compiled, change=_float8),
    "diffusers, torchao searched": functools.partial(_compiled, change=functools.partial(_float8, search=True)),
}
"""The search takes more than two minutes for Qwen-Image. What it sets stays set, so that it comes last."""


CASES = (
    Case(
        "Qwen-Image",
        5,
        qwen_image.SPECS[0],
        functools.partial(QwenImageTransformer.from_config, QWEN),
        _qwen,
        _qwen_theirs,
    ),
    Case("FLUX.1-dev", 5, flux.SPECS[0], functools.partial(FluxTransformer.from_config, FLUX), _flux, _flux_theirs),
    Case("Wan2.2-A14B", 2, wan.SPECS[0], functools.partial(WanTransformer.from_config, WAN), _wan, _wan_theirs),
)


def measure(names: Sequence[str], seconds: float) -> Iterator[Measurement]:
    """Model by model, and what takes longest to compile after all of them. Nothing new starts after `seconds`."""
    deadline, cases = time.monotonic() + seconds, [case for case in CASES if case.name in names]
    for case in cases:
        best: dict[str, Build] = {BEST: functools.partial(_best, case)}
        yield from _all_of(case, {**_ours_of(case), **_theirs_of(case, QUICK), **best}, deadline)
        yield from _in_turns(case, deadline)
    for case in cases:
        yield from _all_of(case, _theirs_of(case, SLOW), deadline)


def _ours_of(case: Case) -> dict[str, Build]:
    return {way.name: functools.partial(_ours, case, way) for way in WAYS}


def _theirs_of(case: Case, changes: Mapping[str, Change]) -> dict[str, Build]:
    return {name: lambda change=change: (case.theirs(change), {}, {}) for name, change in changes.items()}


def _best(case: Case) -> tuple[Step, Mapping[str, int], Mapping[str, Sequence[str]]]:
    """diffusers with the best attention that is installed, its blocks compiled: each as one graph or, where that
    attention does not let itself be traced, in pieces around it.
    """
    for whole in (True, False):
        used: dict[str, Sequence[str]] = {}

        def change(module: Any, used: dict[str, Sequence[str]] = used) -> None:
            used["all"] = [turns.best_attention(module, DEVICE, DTYPE).name]

        step = case.theirs(functools.partial(_compiled, change=change, whole=whole))
        try:
            step()
        except torch._dynamo.exc.TorchDynamoException as error:
            if not whole:
                raise
            print(f"{case.name}, {used['all'][0]}: not one graph: {str(error)[:200]}", file=sys.stderr)
            del step
            _cleared()
            torch.compiler.reset()
        else:
            return step, {}, used if whole else {"all": [*used["all"], "blocks in pieces"]}
    raise AssertionError("the second way is returned or raised")


def _in_turns(case: Case, deadline: float) -> Iterator[Measurement]:
    """Ours and diffusers with its best attention, together in memory, each repetition with another one first."""
    if time.monotonic() > deadline:
        yield Measurement(case.name, "in turns", None, problem="no time left")
        return
    try:
        yield from _turned(case)
    except Exception as error:  # noqa: BLE001 - a way that cannot run is a row of the table
        yield Measurement(case.name, "in turns", None, problem=f"{type(error).__name__}: {str(error)[:200]}")


@torch.inference_mode()
def _turned(case: Case) -> list[Measurement]:
    _cleared()
    torch.compiler.reset()
    sides: dict[str, Build] = {way.name: functools.partial(_ours, case, way) for way in WAYS if way.name in TURNS}
    sides[BEST] = functools.partial(_best, case)
    built = {name: build() for name, build in sides.items()}
    for step, _, _ in built.values():
        step()
    taken = turns.take_turns({name: made[0] for name, made in built.items()}, REPETITIONS, _milliseconds)
    return [
        Measurement(case.name, f"in turns: {name}", statistics.median(runs), layers=layers, attention=used, runs=runs)
        for (name, (_, layers, used)), runs in zip(built.items(), taken.values(), strict=True)
    ]


def _all_of(case: Case, builds: Mapping[str, Build], deadline: float) -> Iterator[Measurement]:
    wanted: Tensor | None = None
    for name, build in builds.items():
        if time.monotonic() > deadline:
            yield Measurement(case.name, name, None, problem="no time left")
            continue
        torch.compiler.reset()
        made, got = _measured(case, name, build, wanted)
        wanted = got if wanted is None else wanted
        yield made


def _cleared() -> None:
    gc.collect()
    torch.cuda.empty_cache()


@torch.inference_mode()
def _measured(case: Case, what: str, build: Build, wanted: Tensor | None) -> tuple[Measurement, Tensor | None]:
    _cleared()
    try:
        step, layers, used = build()
        torch.cuda.reset_peak_memory_stats()
        got = step().float()
        taken = [_milliseconds(step) for _ in range(case.steps + 1)][1:]
    except Exception as error:  # noqa: BLE001 - a way that cannot run is a row of the table
        return Measurement(case.name, what, None, problem=f"{type(error).__name__}: {str(error)[:200]}"), None
    compared = wanted is not None and what.startswith("ours")
    error = float((got - wanted).norm() / wanted.norm()) if compared and wanted is not None else None
    gib = torch.cuda.max_memory_allocated() / 2**30
    median = statistics.median(taken)
    device, problem = timing.attempt(_in_a_graph, step, case.steps) if median < LONG else (None, "")
    return Measurement(case.name, what, median, device, gib, error, layers, used, problem), got


def _in_a_graph(step: Step, repeats: int) -> float:
    """Milliseconds of the device alone."""
    return timing.time_on_gpu(step, [()], calls=1, repeats=repeats) * 1e3


def _milliseconds(step: Step) -> float:
    if DEVICE.type == "cpu":
        began = time.perf_counter()
        step()
        return (time.perf_counter() - began) * 1e3
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    step()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def table(measurements: Sequence[Measurement]) -> str:
    lines = [f"{'model':12} {'what':36} {'ms':>8} {'device':>8} {'GiB':>6} {'error':>9}"]
    for m in sorted(measurements, key=lambda m: [case.name for case in CASES].index(m.model)):
        parts = ((m.milliseconds, "8.1f", 8), (m.device, "8.1f", 8), (m.gib, "6.1f", 6), (m.error, "9.1e", 9))
        figures = " ".join(" " * width if part is None else f"{part:{form}}" for part, form, width in parts)
        lines.append(f"{m.model:12} {m.what:36} {figures} {dict(m.attention) or ''} {m.problem}")
    return "\n".join(lines)


def options_of(description: str) -> argparse.Namespace:
    """Which models, how long, and where to."""
    parser = Parser(description=description)
    parser.add_argument("--models", nargs="+", choices=[case.name for case in CASES], default=[c.name for c in CASES])
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--results", type=Path, default=timing.RESULTS, help="folder of the JSON file")
    return parser.parse_args()


def main() -> None:
    options = options_of("time a step of full-size denoisers")
    timing.require_gpu()
    made = measure(options.models, options.seconds)
    print(table(timing.recorded("benchmarks/bench_models.py", "models", made, options.results)))


if __name__ == "__main__":
    main()
