"""Weights with adapters merged into them: how many are kept, for whom, what they cost, and what is refused."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from omni_grpc.features.lora.merged import VariantLinear, fault
from omni_grpc.features.lora.variants import Key, MergedCache
from omni_grpc.nn.linear import AnyLinear, Linear
from omni_grpc.resolve.request import resolve_request
from omni_grpc.types.errors import ConfigError, InvalidArgument
from omni_grpc.types.lora import Adapter, Lora, copies
from tests.features.adapter_files import Source
from tests.features.adapter_kinds import dora_peft, glora, norms, oft_lycoris
from tests.features.suite import FP8, INT8, OFFLOAD, Suite, alone, denoisers, far, run, save
from tests.models.cases import ENTRIES
from tests.models.model import Model


class State:
    """Whoever uses a weight."""

    def __init__(self, *loras: Lora) -> None:
        self.request = SimpleNamespace(loras=loras)


def lora(name: str) -> Lora:
    return Lora(lora_id=name)


def key(name: str) -> Key:
    return 0, ((name, 1.0),)


def weights(count: int, size: int = 10) -> list[Tensor]:
    return [torch.full((size,), float(number)) for number in range(count)]


def missing() -> Tensor:
    pytest.fail("it is kept")


def test_no_more_bytes_are_kept_than_there_may_be_and_those_used_longest_ago_go_first() -> None:
    cache, made = MergedCache(100), weights(4)
    for number, weight in enumerate(made[:3]):
        state = State(lora(f"a{number}"))
        cache.get(key(f"a{number}"), [state], lambda weight=weight: weight)  # type: ignore[misc]
        del state
        gc.collect()
    # 40 bytes each: the first one went
    assert (cache.size, len(cache), cache.generation) == (80, 2, 1)
    assert cache.get(key("a1"), [], missing) is made[1]
    cache.get(key("a3"), [], lambda: made[3])
    assert cache.get(key("a1"), [], missing) is made[1]
    assert (cache.size, cache.generation) == (80, 2)


def test_what_is_in_use_stays_and_what_finds_no_room_is_made_anew() -> None:
    cache, (first, second, third) = MergedCache(80), weights(3)
    running = State(lora("first"), lora("second"))
    cache.get(key("first"), [running], lambda: first)
    cache.get(key("second"), [running], lambda: second)
    for _ in range(2):
        assert cache.get(key("third"), [State(lora("third"))], lambda: third) is third
    assert (cache.merges, cache.size, cache.generation) == (4, 80, 0)
    del running
    gc.collect()
    cache.get(key("third"), [], lambda: third)
    assert cache.get(key("third"), [], missing) is third
    cache.clear()
    assert (cache.size, len(cache)) == (0, 0)


def test_a_request_that_runs_from_a_recording_has_its_weights_in_use() -> None:
    """Nothing but its key is asked for then."""
    cache, (first, second) = MergedCache(40), weights(2)
    cache.get(key("first"), [], lambda: first)
    running = State(lora("first"))
    assert cache.variant((running, "cond")) == (lora("first"), 0)
    cache.get(key("second"), [], lambda: second)
    assert cache.get(key("first"), [], missing) is first


def test_recordings_of_rows_with_adapters_are_stale_when_a_weight_goes() -> None:
    cache = MergedCache(40)
    with_it, without = (State(lora("a")), "cond"), (State(), "cond")
    before = cache.variant(with_it), cache.variant(without)
    for name in ("one", "other"):
        cache.get(key(name), [], lambda: torch.ones(10))
    assert cache.variant(with_it) != before[0]
    assert cache.variant(without) == before[1]
    assert cache.evictions == 1


def test_a_request_needs_copies_of_layers_that_an_adapter_copies_or_two_rescale() -> None:
    def adapter(name: str, copied: dict[str, int], rescaled: dict[str, int]) -> Adapter:
        return Adapter(
            id=name, file="", sha256="", format="", rank=0, size_bytes=0, applied={}, copied=copied, rescaled=rescaled
        )

    adapters = [
        adapter("oft", {"transformer.a": 10, "transformer_2.a": 10}, {}),
        adapter("dora", {}, {"transformer.a": 10, "transformer.b": 20}),
        adapter("other", {}, {"transformer.b": 20}),
    ]
    asked = {
        ("oft",): {"transformer.a": 10, "transformer_2.a": 10},
        ("dora",): {},
        ("dora", "other"): {"transformer.b": 20},
        ("dora", "oft"): {"transformer.a": 10, "transformer_2.a": 10},
    }
    for names, expected in asked.items():
        assert copies([Lora(lora_id=name) for name in names], adapters) == expected
    assert copies([Lora(lora_id="oft", target="transformer_2")], adapters) == {"transformer_2.a": 10}
    assert copies([Lora(lora_id="oft", scale=0.0)], adapters) == {}


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Suite:
    folder = tmp_path_factory.mktemp("copies")
    made = Suite(ENTRIES["QwenImagePipeline"], folder)
    source = Source("QwenImagePipeline", made.weights("transformer"))
    for writer in (dora_peft, glora, norms, oft_lycoris):
        kind = writer(source)
        save(kind.tensors, folder / f"{writer.__name__}.safetensors", kind.header)
    return made


def settings(suite: Suite) -> dict[str, dict[str, str]]:
    names = ("dora_peft", "glora", "norms", "oft_lycoris")
    return {"lora": {name: str(suite.folder.parent / f"{name}.safetensors") for name in names}}


def layers(model: Model) -> list[VariantLinear]:
    return [part for part in denoisers(model)["transformer"].modules() if isinstance(part, VariantLinear)]


def needed(model: Model, *names: str) -> int:
    return sum(copies([Lora(lora_id=name) for name in names], model.ready.found.loras).values())


def test_a_request_that_needs_more_than_there_may_be_is_refused_with_what_would_work(suite: Suite) -> None:
    model = suite.load(**settings(suite), lora_merged_cache=1000)
    whole = needed(model, "glora")
    assert whole == sum(part.in_features * part.out_features * 4 for part in layers(model) if "glora" in part.pieces)
    with pytest.raises(InvalidArgument, match=f"start it with --lora-merged-cache {whole}, use fewer") as caught:
        model.request(model.draft(loras=(Lora(lora_id="glora"),)))
    assert [violation.field for violation in caught.value.violations] == ["sampling.loras"]
    # outputs that are rescaled need none
    request = model.request(model.draft(steps=2, loras=(Lora(lora_id="dora_peft"),)))
    alone(model, request)
    assert len(layers(model)[0].cache) == 0


def test_requests_that_do_not_fit_together_are_what_they_are_alone(suite: Suite) -> None:
    probe = suite.load(**settings(suite))
    model = suite.load(**settings(suite), lora_merged_cache=needed(probe, "glora"))
    requests = [
        model.request(model.draft(steps=2, loras=(Lora(lora_id="glora", scale=scale),)), f"job{scale}")
        for scale in (0.5, 1.0, -0.25)
    ]
    together = run(model, *((0, request) for request in requests))
    cache = layers(model)[0].cache
    assert cache.size <= cache.limit
    for request in requests:
        assert far(together[request.id].latents, alone(probe, request).latents) < 1e-5


def test_the_reply_tells_of_copies(suite: Suite) -> None:
    model = suite.load(**settings(suite))
    codes = {}
    for name in ("glora", "dora_peft"):
        warnings = resolve_request(model.draft(loras=(Lora(lora_id=name),)), model.facts, id="job").warnings
        codes[name] = [(one.code, one.applied) for one in warnings if one.code == "LORA_MERGED"]
    count = len(copies([Lora(lora_id="glora")], model.ready.found.loras))
    assert codes == {"glora": [("LORA_MERGED", f"{count} copies, {needed(model, 'glora')} bytes")], "dora_peft": []}


@pytest.mark.parametrize("base", [INT8, FP8, OFFLOAD, {"batch_invariant": True}], ids=repr)
@pytest.mark.parametrize("name", ["dora_peft", "glora", "oft_lycoris"])
def test_copies_are_merged_from_what_a_layer_computes_with(suite: Suite, base: dict[str, object], name: str) -> None:
    """Layer by layer: x W'^T + b, with W' made of the dequantized weight; at scale 0 the layer itself, bit by bit."""
    files = {name: settings(suite)["lora"][name]}
    model, plain = suite.load(base, lora=files), suite.load(base)
    on, off = Lora(lora_id=name, scale=0.7), Lora(lora_id=name, scale=0.0)
    request = model.request(model.draft(steps=2, loras=(off,)))
    assert torch.equal(alone(model, request).latents, alone(plain, model.request(model.draft(steps=2))).latents)
    mixed = [
        model.request(model.draft(steps=2, wider=n % 2, loras=loras), f"{n}") for n, loras in enumerate([(), (on,)] * 2)
    ]
    together = run(model, *((0, request) for request in mixed))
    for one in mixed:
        expected = alone(model, one).latents
        exact = base.get("batch_invariant")
        mine = together[one.id].latents
        assert torch.equal(mine, expected) if exact else far(mine, expected) < 1e-4
    for layer in layers(model):
        weight, bias = layer.full_precision()
        made = layer.merged_weight(((name, 0.7),))
        for piece in layer.pieces[name]:
            parts = [weight[site.rows] for site in piece.sites if site.layer is layer]
            if len(parts) == len(piece.sites):
                again = piece.transform.merged(torch.cat(parts), 0.7 * piece.scale)
                mine = torch.cat([made[site.rows] for site in piece.sites])
                assert far(mine, again) < 1e-6
        assert bias is None or far(bias, layer.bias) == 0


def test_a_changed_norm_is_refused_where_batches_must_not_matter(suite: Suite) -> None:
    files = {"norms": settings(suite)["lora"]["norms"]}
    with pytest.raises(ConfigError, match=r"leave out --batch-invariant, or use a file without it"):
        suite.load(lora=files, batch_invariant=True)


def test_a_norm_without_a_place_for_it_is_refused(suite: Suite, tmp_path: Path) -> None:
    save({"transformer_blocks.0.attn.norm_q.diff_b": torch.ones(32)}, tmp_path / "a.safetensors")
    with pytest.raises(ConfigError, match=r"norm_q of the model has no bias; use a file without it"):
        suite.load(lora={"a": str(tmp_path / "a.safetensors")})


def test_a_layer_that_has_a_part_of_its_weight_is_refused(suite: Suite) -> None:
    class Part(AnyLinear):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.inner = Linear(2, 2, stream="img")

        def forward(self, x: Tensor) -> Tensor:
            return x

        def shapes(self) -> dict[str, tuple[int, ...]]:
            return {}

        def load_tensor(self, name: str, tensor: Tensor) -> None:
            pass

    assert fault(Linear(2, 2, stream="img"), "OFT") == ""
    assert "OFT makes a new weight of the layer, of which a Part does not have the whole" in fault(Part(), "OFT")
