"""Where memory runs out: one code in every phase, a message that says what would help here, and no harm to others."""

from __future__ import annotations

import queue
import shlex
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from omni_grpc import ops
from omni_grpc.checkpoint.registry import open_checkpoint, specs
from omni_grpc.config import EngineConfig, options
from omni_grpc.config.settings import settings
from omni_grpc.models.qwen_image.pipeline_text_to_image import QwenImagePipeline
from omni_grpc.resolve.memory_hints import PHASES, REMEDIES, out_of_memory, switches
from omni_grpc.resolve.request import resolve_request
from omni_grpc.resolve.rules import ServingFacts
from omni_grpc.resolve.settings import Placement, check_settings
from omni_grpc.types.diffusers_spec import opaque_spec
from omni_grpc.types.errors import Code, Failure
from omni_grpc.types.plan import Broken, Died, Plan, Prepared, Ready, Stepped
from omni_grpc.types.request import Draft, Task
from omni_grpc.types.spec import Checkpoint, ModelSpec
from omni_grpc.worker.failure import failure, ran_out_of_memory
from omni_grpc.worker.worker import Worker
from tests.toy import toy_spec

CUDA = Placement(device="cuda:0", dtype="bfloat16", cpu_threads=None)
CPU = Placement(device="cpu", dtype="float32", cpu_threads=1)
ADAPTED = opaque_spec("AnyPipeline")


def flags(spec: ModelSpec, placement: Placement, phase: str, **on: Any) -> list[str]:
    checkpoint = Checkpoint(name="m", path=None, spec=spec, configs={})  # type: ignore[arg-type]
    config = EngineConfig.from_settings(model="m", **on)
    return [switch.flag for switch in switches(config, checkpoint, placement, phase)]


@pytest.mark.parametrize(
    ("spec", "placement", "on", "phase", "expected"),
    [
        (
            toy_spec(),
            CUDA,
            {},
            "load",
            ["--enable-layerwise-offload", "--enable-cpu-offload", "--quantization int8"],
        ),
        (
            toy_spec(),
            CUDA,
            {},
            "step",
            [
                "--enable-layerwise-offload",
                "--enable-cpu-offload",
                "--max-num-seqs 4",
                "--cuda-graph-tokens 0",
                "--quantization int8",
            ],
        ),
        (
            toy_spec(),
            CUDA,
            {"cuda_graph_tokens": 0, "quantization": "int8", "max_num_seqs": 1},
            "decode",
            ["--enable-layerwise-offload", "--enable-cpu-offload", "--vae-use-tiling"],
        ),
        (
            toy_spec(),
            CUDA,
            {"enable_layerwise_offload": True, "quantization": "int8"},
            "load",
            ["--enable-cpu-offload"],
        ),
        (
            toy_spec(),
            CUDA,
            {"enable_layerwise_offload": True, "max_num_seqs": 1, "gpu_memory_budget": 8},
            "step",
            ["--enable-cpu-offload", "--gpu-memory-budget 10.0", "--quantization int8"],
        ),
        (
            toy_spec(),
            CUDA,
            {"enable_layerwise_offload": True, "layerwise_resident_blocks": 4, "quantization": "int8"},
            "load",
            ["--layerwise-resident-blocks 0", "--enable-cpu-offload"],
        ),
        (toy_spec(), CPU, {}, "load", ["--quantization int8", "--dtype bfloat16"]),
        (toy_spec(), CPU, {"quantization": "int8"}, "prepare", ["--max-num-seqs 4", "--dtype bfloat16"]),
        (ADAPTED, CUDA, {}, "step", ["--enable-layerwise-offload", "--enable-cpu-offload"]),
        (ADAPTED, CUDA, {"enable_cpu_offload": True}, "load", []),
        (ADAPTED, CUDA, {"enable_cpu_offload": True}, "decode", ["--vae-use-slicing", "--vae-use-tiling"]),
        (ADAPTED, CPU, {"vae_use_slicing": True}, "decode", ["--vae-use-tiling", "--dtype bfloat16"]),
    ],
)
def test_what_helps_is_named_where_the_model_takes_it_and_it_is_not_on(
    spec: ModelSpec, placement: Placement, on: dict[str, Any], phase: str, expected: list[str]
) -> None:
    assert flags(spec, placement, phase, **on) == expected


def test_rows_are_settings_and_phases() -> None:
    known = {option.name for option in options()}
    assert {remedy.setting for remedy in REMEDIES} <= known
    assert {remedy.excludes for remedy in REMEDIES} <= known | {""}
    assert {phase for remedy in REMEDIES for phase in remedy.phases} == set(PHASES)


@pytest.mark.parametrize("spec", [*specs().values(), ADAPTED], ids=lambda spec: spec.name)
@pytest.mark.parametrize("placement", [CUDA, CPU], ids=["cuda", "cpu"])
def test_each_flag_is_one_that_the_server_takes(spec: ModelSpec, placement: Placement) -> None:
    for phase in PHASES:
        for flag in flags(spec, placement, phase):
            config = settings(["--model", "m", *shlex.split(flag)], {}, prog="serve", description="")
            assert config != EngineConfig.from_settings(model="m")
            check_settings(config, Checkpoint(name="m", path=None, spec=spec, configs={}))  # type: ignore[arg-type]


def test_every_way_to_run_out_of_memory_is_known() -> None:
    with pytest.raises(RuntimeError) as host:
        torch.empty(1 << 50)
    with pytest.raises(MemoryError) as array:
        np.empty(1 << 50)
    told = ("CUDA error: out of memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    errors = [host.value, array.value, torch.OutOfMemoryError("CUDA out of memory"), *map(RuntimeError, told)]
    for error in errors:
        assert ran_out_of_memory(error), error
        expected = Failure(
            code=Code.RESOURCE_EXHAUSTED, reason="OUT_OF_MEMORY", message="out of memory while decoding job_1"
        )
        assert failure(error, "decoding job_1") == expected
    assert not ran_out_of_memory(RuntimeError("shape mismatch"))
    assert not ran_out_of_memory(ValueError("DefaultCPUAllocator"))


@pytest.mark.parametrize(
    ("tasks", "phase", "ways"),
    [
        ((Task.TEXT_TO_IMAGE,), "load", ""),
        ((Task.TEXT_TO_IMAGE,), "step", "; or ask for fewer outputs or a smaller size"),
        (
            (Task.TEXT_TO_VIDEO, Task.IMAGE_TO_VIDEO),
            "decode",
            "; or ask for fewer outputs or a smaller size, or fewer frames",
        ),
        ((Task.TEXT_TO_AUDIO,), "prepare", "; or ask for fewer outputs or a shorter duration"),
    ],
)
def test_the_message_names_the_flags_and_what_a_request_can_ask_for(
    tasks: tuple[Task, ...], phase: str, ways: str
) -> None:
    checkpoint = Checkpoint(name="m", path=None, spec=toy_spec(tasks=tasks), configs={})  # type: ignore[arg-type]
    on = {"max_num_seqs": 1, "quantization": "int8", "vae_use_tiling": True, "cuda_graph_tokens": 0}
    config = EngineConfig.from_settings(model="m", **on)
    given = Failure(code=Code.RESOURCE_EXHAUSTED, reason="OUT_OF_MEMORY", message="out of memory", metadata={"a": "b"})
    told = out_of_memory(given, phase, config, checkpoint, CUDA)
    both = "--enable-layerwise-offload, --enable-cpu-offload"
    assert told.message == (f"out of memory; start the server with {both} (any of them){ways}")
    assert told.metadata == {"a": "b", "switches": both}
    nothing = EngineConfig.from_settings(model="m", enable_layerwise_offload=True, enable_cpu_offload=True, **on)
    rest = ways.removeprefix("; or ") or "use a device with more memory"
    assert out_of_memory(given, phase, nothing, checkpoint, CUDA).message == f"out of memory; {rest}"


# --- the worker -------------------------------------------------------------------------------------------------------


def fail(*arguments: Any, **more: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")


class Lanes:
    """A worker in this process, and its reports."""

    def __init__(self, folder: str) -> None:
        self.config = EngineConfig.from_settings(model=folder, device="cpu", cpu_threads=1, warm_up_seconds=0)
        self.checkpoint = open_checkpoint(folder, name="tiny")
        self.reports: queue.Queue[Any] = queue.Queue()
        self.worker = Worker(self.config, self.checkpoint, self.reports.put, "omni-test-memory-")

    def next(self, kind: type) -> Any:
        while not isinstance(report := self.reports.get(timeout=60), kind):
            assert not isinstance(report, Broken | Died), report
        return report

    def admit(self, name: str, width: int = 32) -> Any:
        draft = Draft(model="tiny", prompt="a star", width=width, height=32, steps=1, seeds=(1,))
        request = resolve_request(draft, ServingFacts(self.checkpoint, self.config.limits), id=name).request
        self.worker.submit(Plan(admit=(request,)))


@pytest.fixture
def lanes(tiny_qwen_image: Any) -> Any:
    made = Lanes(str(tiny_qwen_image))
    yield made
    made.worker.close()


SWITCHES = {
    "decode": "--max-num-seqs 4, --vae-use-tiling, --quantization int8, --dtype bfloat16",
    "load": "--quantization int8, --dtype bfloat16",
    "prepare": "--max-num-seqs 4, --quantization int8, --dtype bfloat16",
}


def check(told: Failure, phase: str, doing: str) -> None:
    assert (told.code, told.reason) == (Code.RESOURCE_EXHAUSTED, "OUT_OF_MEMORY")
    expected = SWITCHES.get(phase, SWITCHES["prepare"])
    assert told.metadata == {"switches": expected}
    assert told.message.startswith(f"out of memory while {doing}; start the server with {expected} (any of them)")


@pytest.mark.parametrize(
    ("owner", "method"),
    # the library's loader is asked inside of what explains its errors as those of the checkpoint
    [(QwenImagePipeline, "load"), (transformers.PreTrainedModel, "from_pretrained")],
)
def test_a_model_that_does_not_fit_is_not_loaded(
    lanes: Lanes, monkeypatch: pytest.MonkeyPatch, owner: type, method: str
) -> None:
    monkeypatch.setattr(owner, method, fail)
    lanes.worker.start()
    check(lanes.next(Died).failure, "load", f"loading {lanes.checkpoint.path}")


@pytest.mark.parametrize(("phase", "method"), [("prepare", "prepare"), ("step", "predict"), ("decode", "decode")])
def test_a_request_that_does_not_fit_fails_and_the_next_one_is_made(
    lanes: Lanes, monkeypatch: pytest.MonkeyPatch, phase: str, method: str
) -> None:
    lanes.worker.start()
    lanes.next(Ready)
    with monkeypatch.context() as patch:
        patch.setattr(QwenImagePipeline, method, fail)
        lanes.admit("big")
        if phase != "prepare":
            lanes.next(Prepared)
            lanes.worker.submit(Plan(step=("big",)))
            stepped = lanes.next(Stepped)
        if phase == "decode":
            lanes.worker.submit(Plan(decode=("big",)))
        broken = stepped.broken[0] if phase == "step" else lanes.next(Broken)
    doing = {"prepare": "preparing big", "step": "stepping big", "decode": "decoding big"}[phase]
    assert (broken.id, broken.phase) == ("big", phase)
    check(broken.failure, phase, doing)
    lanes.admit("small")
    lanes.next(Prepared)
    lanes.worker.submit(Plan(step=("small",)))
    assert [progress.finished for progress in lanes.next(Stepped).progress] == [True]


REAL = """
import resource, sys
from omni_grpc import Omni
from omni_grpc.types.errors import ResourceExhausted

with Omni(sys.argv[1], device="cpu", cpu_threads=1, warm_up_seconds=0) as omni:
    small = {"width": 32, "height": 32, "steps": 1, "seed": 1}
    before = omni.generate("a star", **small).files
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
    try:
        omni.generate("a star", width=2048, height=2048, steps=1, seed=1)
    except ResourceExhausted as error:
        print(error.reason, error)
    assert omni.generate("a star", **small).files == before
    print("the next one is the same")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and limits the address space")
def test_memory_of_the_host_that_really_runs_out_is_told_and_survived(tiny_qwen_image: Any) -> None:
    done = subprocess.run(
        [sys.executable, "-c", REAL, str(tiny_qwen_image)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    first, last = done.stdout.splitlines()
    assert first.startswith("OUT_OF_MEMORY out of memory while ")
    assert "start the server with --max-num-seqs 4, --quantization int8, --dtype bfloat16" in first
    assert last == "the next one is the same"


LINE = torch.zeros(1, 1024)
LINES = LINE.expand(2**31, 1024)
"""8 TB that lie in 4 kB: what is made of it has no place."""
ROWS = torch.tensor([0, 2**30], dtype=torch.int32)
HEADS = torch.zeros(1, 1, 4096).expand(2**30, 1, 4096)


@pytest.mark.skipif(not ops.load_native().loaded, reason="no op library")
@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda: ops.quant.gelu_tanh(LINES), id="gelu_tanh"),
        pytest.param(lambda: ops.quant.silu_mul(LINES, LINES), id="silu_mul"),
        pytest.param(lambda: ops.quant.quantize_rows(LINES, torch.int8), id="quantize_rows"),
        pytest.param(lambda: ops.norm.norm_modulate(LINES, LINE, LINE, None), id="norm_modulate"),
        pytest.param(lambda: ops.norm.gate_add(LINES, LINES, LINE, None), id="gate_add"),
        pytest.param(
            lambda: ops.attention_cpu.attention_cpu(HEADS, HEADS, HEADS, ROWS, ROWS, 1.0, False), id="attention_cpu"
        ),
    ],
)
def test_an_op_of_the_library_that_finds_no_memory_says_so(call: Callable[[], Any]) -> None:
    """The stable ABI itself says only that a call failed."""
    with pytest.raises(RuntimeError, match="omni_grpc: out of memory") as caught:
        call()
    assert ran_out_of_memory(caught.value)
    assert failure(caught.value, "stepping").reason == "OUT_OF_MEMORY"


def test_a_broken_device_is_not_one_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("omni_grpc: out of memory: torch_call_dispatcher(new_empty) API call failed")
    assert ran_out_of_memory(error)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1, 2))
    assert ran_out_of_memory(error)

    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "mem_get_info", fail)
    assert not ran_out_of_memory(error)
    assert failure(error, "stepping").reason == "WORKER_ERROR"
