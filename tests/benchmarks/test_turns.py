"""bench_models on a CPU, with the tiny Wan: which attention its baseline has, and how sides take turns."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

from benchmarks import bench_models, turns
from omni_grpc.models.wan.wan_transformer import WanTransformer

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of the tiny checkpoint's first expert."""
    from tools.tiny_checkpoints import BUILDERS

    folder = BUILDERS["wan_t2v"](tmp_path_factory.mktemp("tiny") / "wan")
    found: dict[str, Any] = json.loads((folder / "transformer/config.json").read_text(encoding="utf-8"))
    return {name: value for name, value in found.items() if not name.startswith("_")}


@pytest.fixture
def case(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[bench_models.Case]:
    """Wan at a size for this machine, in float32, and nothing compiled."""
    monkeypatch.setattr(bench_models, "DEVICE", CPU)
    monkeypatch.setattr(bench_models, "DTYPE", torch.float32)
    wan = next(case for case in bench_models.CASES if case.name == "Wan2.2-A14B")
    with torch.compiler.set_stance("force_eager"):
        yield dataclasses.replace(
            wan,
            build=functools.partial(WanTransformer.from_config, config),
            ours=functools.partial(bench_models._wan, text=8, size=(2, 2, 2), config=config),
            theirs=functools.partial(bench_models._wan_theirs, text=8, size=(2, 4, 4), config=config),
        )


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Counter[str]]:
    """Puts attention of the test's own in place of one of the library's, as if its package were there; counts calls."""
    calls: Counter[str] = Counter()
    installed: set[AttentionBackendName] = set()
    check = attention_dispatch._check_attention_backend_requirements
    monkeypatch.setattr(
        attention_dispatch,
        "_check_attention_backend_requirements",
        lambda asked: None if asked in installed else check(asked),
    )

    def install(name: str) -> Counter[str]:
        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: Any) -> torch.Tensor:
            calls[name] += 1
            heads = (each.transpose(1, 2) for each in (query, key, value))
            return torch.nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2)

        backend = AttentionBackendName(name)
        installed.add(backend)
        monkeypatch.setitem(_AttentionBackendRegistry._backends, backend, attend)
        monkeypatch.setitem(_AttentionBackendRegistry._supported_arg_names, backend, {"query", "key", "value"})
        return calls

    return install


@pytest.mark.parametrize(
    ("there", "best"),
    [
        ((), "native"),
        (("flash",), "flash"),
        (("flash", "_flash_3"), "_flash_3"),
        (("_flash_3", "_native_cudnn"), "_flash_3"),
        (("_native_cudnn",), "_native_cudnn"),
        (("_native_cudnn", "flash"), "flash"),
    ],
)
def test_the_baseline_has_the_best_attention_that_is_installed(
    there: tuple[str, ...], best: str, config: dict[str, Any], install: Callable[[str], Counter[str]]
) -> None:
    calls = Counter[str]()
    for name in there:
        calls = install(name)
    module = WanTransformer3DModel(**config).eval()
    chosen = turns.best_attention(module, CPU, torch.float32)
    assert chosen.name == best
    assert len(chosen.refused) == {"_flash_3": 0, "flash": 1, "_native_cudnn": 2, "native": 3}[best]
    calls.clear()
    module(torch.randn(1, config["in_channels"], 2, 4, 4), torch.tensor([500]), torch.randn(1, 8, config["text_dim"]))
    expected = {} if best == "native" else {best: 2 * config["num_layers"]}  # itself and the text, in each block
    assert calls == expected


@pytest.mark.parametrize("sides", [2, 3])
def test_sides_take_turns_to_be_first(sides: int) -> None:
    ran: list[str] = []
    steps = {name: functools.partial(ran.append, name) for name in "abc"[:sides]}

    def clock(step: Callable[[], None]) -> float:
        step()
        return float(len(ran))

    taken = turns.take_turns(steps, 6, clock)
    rounds = [ran[at : at + sides] for at in range(0, len(ran), sides)]
    assert Counter(each[0] for each in rounds) == dict.fromkeys(steps, 6 // sides)
    assert all(sorted(each) == sorted(steps) for each in rounds)
    assert {name: [ran[int(at) - 1] for at in times] for name, times in taken.items()} == {
        name: [name] * 6 for name in steps
    }


def test_ours_and_diffusers_are_timed_in_turns(case: bench_models.Case, install: Callable[[str], Counter[str]]) -> None:
    calls = install("_flash_3")
    made = list(bench_models._in_turns(case, float("inf")))
    assert [m.problem for m in made] == [""] * 3
    assert [m.what for m in made] == [f"in turns: {name}" for name in (*bench_models.TURNS, bench_models.BEST)]
    assert [len(m.runs) for m in made] == [bench_models.REPETITIONS] * 3
    assert all(min(m.runs) <= (m.milliseconds or 0) <= max(m.runs) for m in made)
    assert made[-1].attention == {"all": ["_flash_3"]}
    assert made[1].layers["fp8"] > 0
    assert calls["_flash_3"] > bench_models.REPETITIONS
    assert bench_models.REPETITIONS % len(made) == 0


def test_attention_that_cannot_be_traced_runs_between_the_pieces_of_a_block(
    case: bench_models.Case, install: Callable[[str], Counter[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def compiled(module: Any, change: Any, whole: bool) -> None:
        asked.append(whole)
        change(module)
        if whole:
            monkeypatch.setattr(module, "forward", cannot)

    def cannot(*_: Any, **__: Any) -> None:
        raise torch._dynamo.exc.Unsupported("attention that is no op")

    install("_flash_3")
    monkeypatch.setattr(bench_models, "_compiled", compiled)
    with torch.inference_mode():
        step, _, used = bench_models._best(case)
        assert step().isfinite().all()
    assert asked == [True, False]
    assert used == {"all": ["_flash_3", "blocks in pieces"]}


def test_what_cannot_run_in_turns_is_a_row(case: bench_models.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = dataclasses.replace(case, theirs=lambda change: (_ for _ in ()).throw(RuntimeError("no memory")))
    (row,) = bench_models._in_turns(broken, float("inf"))
    assert (row.milliseconds, row.problem) == (None, "RuntimeError: no memory")
    (row,) = bench_models._in_turns(case, float("-inf"))
    assert row.problem == "no time left"


def test_ours_and_diffusers_are_the_same_size(case: bench_models.Case) -> None:
    """What is compared has the same tokens: latents of 2 x 4 x 4 are 2 x 2 x 2 patches."""
    with torch.inference_mode():
        ours, theirs = (
            case.ours(bench_models._built(case, bench_models.WAYS[0])[0])(),
            case.theirs(lambda module: None)(),
        )
    assert ours.numel() == theirs.numel()
