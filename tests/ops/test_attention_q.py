"""8-bit attention on the CPU, where its references serve, and what both of its ops refuse."""

from __future__ import annotations

import pytest
import torch

from omni_grpc.ops.attention_q import attention_q, attention_quantize
from tests.ops import attention_q_cases as cases
from tests.ops import rope_cases
from tests.ops.attention_q_cases import SCALE, Case, inputs

OPS = torch.ops.omni_grpc


@pytest.mark.parametrize("case", [case for case in cases.CASES if case.plan == "together"], ids=str)
def test_case(case: Case, seed: int) -> None:
    cases.check_case(case, "cpu", seed)


@pytest.mark.parametrize("check", cases.CHECKS, ids=lambda check: check.__name__)
def test_check(check, seed: int) -> None:
    check("cpu", seed)


def test_the_ops_are_what_their_schemas_and_fakes_say(seed: int) -> None:
    x = inputs(Case("across", heads=4), "cpu", seed)
    first = OPS.attention_quantize.default
    torch.library.opcheck(first, (x.q, x.k, x.v, x.cu_q, x.cu_k), test_utils=("test_schema", "test_faketensor"))
    (stream,) = rope_cases.inputs(rope_cases.Case((130,), size=128, placed=False), "cpu", seed).streams
    cu = torch.tensor([0, 70, 130], dtype=torch.int32)
    one = ([stream.q], [stream.k], [stream.v], [*stream.weights], None, [], cu, "rms", 1e-6)
    torch.library.opcheck(OPS.qk_norm_rope_quantize_tiles.default, one, test_utils=("test_schema", "test_faketensor"))
    arguments = (*x.coded(), x.cu_q, x.cu_k, x.q.shape[0], SCALE, "together")
    # without test_schema, which cannot compare inputs of float8
    torch.library.opcheck(OPS.attention_q.default, arguments, test_utils=("test_faketensor",))


@pytest.mark.parametrize(("why", "arguments"), cases.refused(), ids=lambda value: value if type(value) is str else "")
def test_what_does_not_fit_is_refused(why: str, arguments: tuple) -> None:
    with pytest.raises(RuntimeError, match=why):
        attention_quantize(*arguments)


def test_attention_refuses_by_name(seed: int) -> None:
    x = inputs(Case("one row of 65"), "cpu", seed)
    coded = x.coded()
    for why, change in {"scale must be above 0": {"scale": 0.0}, "plan must be one of": {"plan": "fast"}}.items():
        given = {"queries": 65, "scale": SCALE, "plan": "together"} | change
        with pytest.raises(RuntimeError, match=why):
            attention_q(coded, x.cu_q, x.cu_k, **given)
    with pytest.raises(RuntimeError, match="what attention_quantize returns for 130 queries"):
        attention_q(coded, x.cu_q, x.cu_k, 130, SCALE)
    with pytest.raises(RuntimeError, match="scales do not match"):
        attention_q(coded._replace(k_scale=coded.q_scale), x.cu_q, x.cu_k, 65, SCALE)
