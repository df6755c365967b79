"""What features do differently on CUDA. Run by `make gpu-test` too, on a machine that has torch and little else."""

from __future__ import annotations

import gc
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from omni_grpc.features import cuda_graphs
from omni_grpc.features.cuda_graphs import CudaRecorder, Graphs
from omni_grpc.features.layerwise_offload import Offloaded
from omni_grpc.features.quant import QuantizedLinear
from omni_grpc.nn import activations
from omni_grpc.nn.activations import QuantizedActivation
from omni_grpc.nn.linear import Linear
from omni_grpc.nn.rows import LayoutCache, Row, Rows
from omni_grpc.nn.stack import Stack
from omni_grpc.ops.gemm import FP8_CAPABILITY
from omni_grpc.ops.host import Region
from omni_grpc.worker.lanes import Lanes
from tests.features.offloaded import BLOCKS, LAYER_BYTES, WIDTH, held, pair, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@torch.inference_mode()
def test_offloaded_weights_are_pinned_and_two_blocks_at_most_take_memory() -> None:
    plain, stack, _ = pair("cuda")
    expected = run(plain, "cuda")
    for _ in range(5):
        assert torch.equal(run(stack, "cuda"), expected)
    # the text's layers were not called, and are pinned when they are
    layers = [layer for layer in stack.modules() if isinstance(layer, Offloaded) and layer.stream != "txt"]
    assert all(tensor.is_pinned() for layer in layers for tensor in layer.host.values())
    assert held(stack) == 0
    del plain
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run(stack, "cuda")
    # two blocks of two layers, and what the forward itself takes
    assert torch.cuda.max_memory_allocated() - before < 2 * 2 * LAYER_BYTES + (1 << 20)


KINDS = pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])


def layer(weight: Tensor, kind: torch.dtype, bias: Tensor | None = None) -> QuantizedLinear:
    """A layer on the weight's device."""
    if weight.is_cuda and kind == torch.float8_e4m3fn and torch.cuda.get_device_capability() < FP8_CAPABILITY:
        pytest.skip("this card has no products of float8")
    with torch.device("meta"):
        made = QuantizedLinear(Linear(weight.shape[1], weight.shape[0], bias is not None, stream="img"), "layer", kind)
    made.load_tensor("weight", weight)
    if bias is not None:
        made.load_tensor("bias", bias)
    return made


@KINDS
@pytest.mark.parametrize("tokens", [0, 1, 16, 17, 300])
@torch.inference_mode()
def test_a_layer_in_8_bits_is_the_same_product_as_on_the_cpu_for_any_number_of_tokens(
    tokens: int, kind: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(rows, 64, generator=generator) for rows in (48, tokens))
    on_gpu, on_cpu = layer(weight.cuda(), kind)(x.cuda()).cpu(), layer(weight, kind)(x)
    close = 1e-5 if kind == torch.int8 else 3e-3
    torch.testing.assert_close(on_gpu, on_cpu, rtol=close, atol=10 * close)


@KINDS
@torch.inference_mode()
def test_a_layer_in_8_bits_takes_a_byte_for_each_weight(kind: torch.dtype) -> None:
    weight = torch.randn(4096, 2048, dtype=torch.bfloat16, device="cuda")
    layer(weight, kind)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    made = layer(weight, kind)
    assert torch.cuda.memory_allocated() - before < 1.01 * weight.numel()
    assert made.weight.dtype == kind


@KINDS
@torch.inference_mode()
def test_outliers_do_not_overflow(kind: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(64, 4096, generator=generator) / 640, torch.randn(8, 4096, generator=generator)
    x[:, 100], x[:, 101] = 1e4, -1e4
    out = layer(weight.cuda(), kind)(x.to("cuda", torch.bfloat16)).cpu()
    exact = x.double() @ weight.double().T
    assert out.isfinite().all()
    assert (out.double() - exact).norm() < 0.05 * exact.norm()


@KINDS
@torch.inference_mode()
def test_tokens_that_a_kernel_codes_on_its_way_are_what_the_layer_makes_of_them(kind: torch.dtype) -> None:
    """Codes are made of what is not rounded to bfloat16 yet, so they differ from those of the layer by that."""
    generator = torch.Generator().manual_seed(0)
    weight, bias, x = (torch.randn(*shape, generator=generator) for shape in ((96, 256), (96,), (70, 256)))
    made = layer(weight.cuda().bfloat16(), kind, bias.cuda().bfloat16())
    x = x.cuda().bfloat16()
    scale, shift = torch.zeros(2, 1, 256, device="cuda", dtype=torch.bfloat16)
    read = activations.norm(x, scale, shift, None, 1e-6, (made,))
    assert isinstance(read, QuantizedActivation)
    exact = torch.nn.functional.layer_norm(x.float(), (256,), eps=1e-6)
    expected = exact @ weight.cuda().bfloat16().float().T + bias.cuda()
    for out in (made(read), made(exact.bfloat16())):
        assert (out.float() - expected).norm() < 0.05 * expected.norm()


@KINDS
@torch.inference_mode()
def test_quantised_layers_work_where_they_are_offloaded(kind: torch.dtype) -> None:
    """Twice: the second time what came for the first is gone."""
    weight, x = torch.randn(64, 64), torch.randn(9, 64, device="cuda")
    resident = layer(weight.cuda(), kind)
    with torch.device("meta"):
        base = QuantizedLinear(Linear(64, 64, bias=False, stream="img"), "layer", kind)
    offloaded = Offloaded(base, Region(1 << 20), torch.device("cuda"))
    offloaded.load_tensor("weight", weight.cuda())
    assert {tensor.device.type for tensor in offloaded.host.values()} == {"cpu"}
    for _ in range(2):
        assert torch.equal(offloaded(x), resident(x))


def graphs_of(stack: Stack, **options: Any) -> Graphs:
    graphs = Graphs(stack, 1000, CudaRecorder(torch.device("cuda", torch.cuda.current_device())), **options)
    stack.wrap(graphs.around)
    return graphs


def batch(stack: Stack, *lengths: int, layouts: LayoutCache) -> tuple[Tensor, Rows]:
    rows = Rows([(SimpleNamespace(), "cond")] * len(lengths), [Row.of(img=length) for length in lengths], layouts)
    rows.bind("blocks", "mod", [torch.randn(1, BLOCKS, WIDTH, device="cuda") for _ in lengths])
    return torch.randn(sum(lengths), WIDTH, device="cuda"), rows


@torch.inference_mode()
def test_a_graph_gives_what_the_blocks_give_bit_for_bit() -> None:
    plain, _, _ = pair("cuda")
    stack = Stack(blocks=list(plain.group("blocks")))
    graphs, layouts = graphs_of(stack), LayoutCache("cuda")
    for _ in range(6):
        for lengths in ((4, 3), (300,), (1, 17, 64)):
            x, rows = batch(stack, *lengths, layouts=layouts)
            assert torch.equal(stack({"img": x}, rows)["img"], plain({"img": x}, rows)["img"])
    assert sum(kept.replay is not None for kept in graphs.kept.values()) == 3
    # what the host does for a batch that was captured is to launch it
    x, rows = batch(stack, 4, 3, layouts=layouts)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        stack({"img": x}, rows)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events()]
    assert names.count("cudaGraphLaunch") == 1
    assert sum("LaunchKernel" in name for name in names) <= 4


@torch.inference_mode()
def test_batches_are_captured_beside_a_thread_that_does_what_decodes_do() -> None:
    """It waits for the device, draws from its generator, and makes the allocator give memory back, but not while a
    batch is captured.
    """
    plain, _, _ = pair("cuda")
    stack, lanes = Stack(blocks=list(plain.group("blocks"))), Lanes()
    graphs, layouts = graphs_of(stack, exclusive=lanes.exclusive), LayoutCache("cuda")
    done, problems, rounds = threading.Event(), [], []

    def decode() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                while not done.is_set():
                    with lanes.work():
                        x = torch.fft.rfft(torch.randn(1 << 20, device="cuda")).abs().cpu().pin_memory()
                        x = x.to("cuda", non_blocking=True)
                        torch.cuda.synchronize()
                        del x
                        torch.cuda.empty_cache()
                    rounds.append(1)
                    time.sleep(0.002)
        except Exception as error:  # noqa: BLE001 - it is what the test looks for
            problems.append(error)

    other = threading.Thread(target=decode)
    other.start()
    for length in range(1, 60):
        for _ in range(5):
            x, rows = batch(stack, length, layouts=layouts)
            assert torch.equal(stack({"img": x}, rows)["img"], plain({"img": x}, rows)["img"])
    done.set()
    other.join(30)
    assert not problems
    assert len(rounds) > 10
    assert sum(kept.replay is not None for kept in graphs.kept.values()) > 10


@torch.inference_mode()
def test_a_block_that_waits_for_the_device_turns_graphs_off() -> None:
    plain, _, _ = pair("cuda")
    stack, told = Stack(blocks=list(plain.group("blocks"))), []
    graphs, layouts = graphs_of(stack, tell=told.append), LayoutCache("cuda")
    hook = stack.group("blocks")[0].register_forward_hook(lambda block, given, out: out[0].sum().item() and None)
    for _ in range(5):
        x, rows = batch(stack, 5, layouts=layouts)
        assert torch.equal(stack({"img": x}, rows)["img"], plain({"img": x}, rows)["img"])
    assert [warning.code for warning in told] == ["CUDA_GRAPHS_OFF"]
    assert not graphs.kept
    hook.remove()
    # neither torch's generator nor its allocator is left as it was in the capture
    assert torch.randn(4, device="cuda").isfinite().all()
    free, _ = torch.cuda.mem_get_info()
    for share in (0.55, 0.65):
        torch.empty(int(share * free), dtype=torch.uint8, device="cuda")
    stack, _ = Stack(blocks=list(plain.group("blocks"))), gc.collect()
    graphs = graphs_of(stack)
    for _ in range(3):
        x, rows = batch(stack, 5, layouts=layouts)
        assert torch.equal(stack({"img": x}, rows)["img"], plain({"img": x}, rows)["img"])
    assert len(graphs.kept) == 1


@torch.inference_mode()
def test_graphs_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a single one at a time, and with all of them forgotten, their memory is another's."""
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 1)
    plain, _, _ = pair("cuda")
    stack, epoch = Stack(blocks=list(plain.group("blocks"))), [0]
    graphs, layouts = graphs_of(stack, epoch=lambda: epoch[0]), LayoutCache("cuda")
    captured = 0
    for turn in range(4):
        for length in (500, 700):
            for _ in range(4):
                x, rows = batch(stack, length, layouts=layouts)
                assert torch.equal(stack({"img": x}, rows)["img"], plain({"img": x}, rows)["img"])
            (kept,) = graphs.kept.values()
            captured += kept.replay is not None
        epoch[0] = turn // 2
    assert captured == 8


@torch.inference_mode()
def test_a_step_in_a_graph_of_its_own_is_computed_block_by_block() -> None:
    """What captures a whole step captures no graph inside."""
    plain, _, _ = pair("cuda")
    stack = Stack(blocks=list(plain.group("blocks")))
    graphs_of(stack)
    x, rows = batch(stack, 4, 3, layouts=LayoutCache("cuda"))
    for _ in range(3):
        expected = stack({"img": x}, rows)["img"]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = stack({"img": x}, rows)["img"]
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)
