"""An op is declared once: its schema, its reference and its callable come from one Python function, and csrc/bind
registers kernels that take what the schema says.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import typing
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from omni_grpc import ops
from omni_grpc.ops.declare import Size, is_op

from .source import PACKAGES, ROOT, python_files, read

MODULES = [importlib.import_module(f"omni_grpc.ops.{module.name}") for module in pkgutil.iter_modules(ops.__path__)]
DECLARED: dict[str, Any] = {
    each.overload._schema.name.partition("::")[2]: each
    for module in MODULES
    for each in filter(is_op, vars(module).values())
}
TYPES = {
    Tensor: "Tensor",
    Tensor | None: "Optional[Tensor]",
    Sequence[Tensor]: "List[Tensor]",
    list[Tensor]: "List[Tensor]",
    Size: "int",
    int: "int",
    Sequence[int]: "List[int]",
    float: "float",
    Sequence[float]: "List[float]",
    bool: "bool",
    str: "str",
    torch.dtype: "int",
}
"""The types of torch's own parser for the annotations of an op."""

IN_CPP = {
    "Tensor": "Tensor",
    **dict.fromkeys(("Optional", "std::optional<Tensor>"), "Tensor?"),
    **dict.fromkeys(("Tensors", "std::vector<Tensor>"), "Tensor[]"),
    "double": "float",
    "bool": "bool",
    "std::string": "str",
    "std::vector<int64_t>": "int[]",
    "std::vector<double>": "float[]",
    "ScalarType": "ScalarType",
    "int64_t": "int",
}
"""The schema's type for each type of a kernel's parameter; an int may be a SymInt."""

SCHEMA = re.compile(r"""\w\((?:Tensor|SymInt|int|float|bool|str|ScalarType)\S* \w+[^\n]*\) -> \(?(?:Tensor|\))""")
DEFINES = re.compile(r"library\.define\(|custom_op\(|infer_schema\(|\bm\.def\(|library\.Library\(")


def test_every_op_is_declared_by_the_decorator() -> None:
    assert len(DECLARED) > 25
    assert DECLARED.keys() == ops.kernels().keys()


@pytest.mark.parametrize("name", sorted(DECLARED))
def test_the_schema_is_the_signature(name: str) -> None:
    op = DECLARED[name]
    assert op.__name__.removesuffix("_op") == name
    hints = typing.get_type_hints(op.__wrapped__, include_extras=True)
    parameters, arguments = inspect.signature(op).parameters.values(), op.overload._schema.arguments
    assert [each.name for each in arguments] == [each.name for each in parameters]
    for mine, theirs in zip(parameters, arguments, strict=True):
        assert str(theirs.type) == TYPES[hints[mine.name]], mine.name
        assert not theirs.kwarg_only, mine.name
        assert not theirs.has_default_value() or theirs.default_value == mine.default, mine.name
        assert (re.search(rf"SymInt {mine.name}\b", str(op.overload._schema)) is not None) == (
            hints[mine.name] == Size
        ), mine.name


def test_a_kernel_takes_what_the_schema_says() -> None:
    sources = {path: path.read_text() for path in sorted((ROOT / "csrc" / "bind").glob("*.cpp"))}
    seen = set()
    for path, text in sources.items():
        for name, function in re.findall(r'm\.impl\("(\w+)", TORCH_BOX\(&(\w+)', text):
            (parameters,) = re.findall(rf"\b{function}\(((?:[^()]|\n)*)\) {{", text)
            named = re.sub(r"/\*.*?\*/", "unnamed", parameters)
            kinds = [IN_CPP[re.sub(r"^const |&? \w+$", "", " ".join(each.split()))] for each in named.split(",")]
            schema = str(DECLARED[name].overload._schema)
            wanted = [
                each.rpartition(" ")[0] for each in schema[schema.index("(") + 1 : schema.index(") ->")].split(", ")
            ]
            plain = [re.sub(r"\(\w!\)", "", each).replace("SymInt", "int") for each in wanted]
            assert kinds == plain, f"{path.name}: {function}"
            seen.add(name)
    in_python = {"gemm_q", "varlen_attention", "varlen_attention_quantized"}
    assert {op for op, keys in ops.kernels().items() if keys} <= seen | in_python


def test_no_schema_stands_anywhere_else() -> None:
    found = [
        f"{path}: {match[0]}"
        for path in python_files(*PACKAGES)
        for pattern in (SCHEMA, DEFINES)
        for match in pattern.finditer(read(path))
        if path.as_posix() != "omni_grpc/ops/declare.py"
    ]
    found += [str(path) for path in (ROOT / "csrc").rglob("*.cpp") if DEFINES.search(path.read_text())]
    assert not found


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (SCHEMA, '"gate(Tensor x, float eps=1e-6) -> Tensor"'),
        (SCHEMA, '"fill(Tensor(a!) out, int number) -> ()"'),
        (DEFINES, 'torch.library.define("omni_grpc::gate", schema)'),
        (DEFINES, 'm.def("gate(Tensor x) -> Tensor")'),
    ],
)
def test_a_second_schema_would_be_found(pattern: re.Pattern[str], text: str) -> None:
    assert pattern.search(text)
