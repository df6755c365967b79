"""How an op is declared: once, as a Python function under `@op`. docs/adding-an-op.md goes through an example.

The function's signature becomes the schema of `torch.ops.omni_grpc.<name>`, its body the reference that defines the op,
and its name a callable that picks kernel or reference. `csrc/bind` registers kernels for these schemas.

torch.library.infer_schema and custom_op do not serve: they make every int a SymInt, require defaults in another order
and put several Python calls in front of each kernel, where one call costs as much as it takes to launch a kernel.
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from omni_grpc.ops.library import NAMESPACE

P = ParamSpec("P")
R = TypeVar("R")

Size = Annotated[int, "SymInt"]
"""The annotation of a number that a compiled graph may keep as a symbol: tokens of a call, the length of a row."""

KERNEL_DTYPES = frozenset({torch.float32, torch.bfloat16})
"""What nearly all kernels compute from."""

SCHEMA_TYPES: Mapping[object, str] = MappingProxyType(
    {
        Tensor: "Tensor",
        Tensor | None: "Tensor?",
        Sequence[Tensor]: "Tensor[]",
        list[Tensor]: "Tensor[]",
        Size: "SymInt",
        int: "int",
        Sequence[int]: "int[]",
        float: "float",
        Sequence[float]: "float[]",
        bool: "bool",
        str: "str",
        torch.dtype: "ScalarType",
        types.NoneType: "()",
    }
)
"""The schema's type for each annotation that an op may use."""


class Op(Protocol[P, R]):
    """What `@op` makes of a function.

    reference: the function itself, which also takes its keyword-only parameters by position. overload: the op as torch
    has it; calling it skips the choice between kernel and reference.
    """

    __name__: str
    reference: Callable[..., R]
    overload: Any

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...


def op(
    *,
    kernel_if: Callable[..., bool] | None = None,
    of: Sequence[str] = (),
    fake: Callable[..., Any] | None = None,
    cuda: Callable[..., Any] | None = None,
    mutates: Collection[str] = (),
) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Declares the decorated function as an op of its name, without a suffix "_op".

    The function defines the op: it serves any device and dtype, checks its inputs, and neither mutates nor aliases
    them, but for those that `mutates` names. Kernels refuse the same inputs in the same words.

    kernel_if: whether kernels serve a call, asked with the parameters named in `of`, by position; the reference is
    called where they do not. Without it every call goes through the dispatcher.
    fake: gives shape, strides and dtype of the results without data, called with all parameters by position. The
    function itself where it reads no values, which is the default.
    cuda: a Python function that serves CUDA, of the same parameters. It is called without the dispatcher where nothing
    needs to see the op, see `directly`.
    """

    def declare(function: Callable[P, R]) -> Op[P, R]:
        name = function.__name__.removesuffix("_op")
        reference = _positional(function)
        overload = define(name + schema_of(function, mutates), reference, fake or reference)
        if cuda is not None:
            torch.library.impl(f"{NAMESPACE}::{name}", "CUDA", cuda)
        called = _dispatching(function, overload, reference, kernel_if, of, cuda)
        called.reference, called.overload = reference, overload
        return typing.cast("Op[P, R]", functools.update_wrapper(called, function))

    return declare


def is_op(value: object) -> bool:
    """Whether something in a module is what `@op` has made."""
    return isinstance(value, types.FunctionType) and hasattr(value, "overload")


def cell_of(op: Any, name: str) -> types.CellType:
    """Where an op's callable keeps "_overload", "_reference" or "_kernel_if": tests and benchmarks exchange them."""
    cell: types.CellType = op.__closure__[op.__code__.co_freevars.index(name)]
    return cell


def define(schema: str, reference: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Registers an op with torch and returns its overload."""
    name, parameters = schema[: schema.index("(")], schema[schema.index("(") :]
    torch.library.define(f"{NAMESPACE}::{name}", parameters, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(f"{NAMESPACE}::{name}", "default", reference)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def schema_of(function: Callable[..., Any], mutates: Collection[str] = ()) -> str:
    """The schema of a function, from its parameters to its results. All parameters are positional in it, and one keeps
    its default unless one without follows. A default dtype has no form in a schema. KeyError for an annotation that
    SCHEMA_TYPES lacks.
    """
    hints = typing.get_type_hints(function, include_extras=True)
    parameters = list(inspect.signature(function).parameters.values())
    last_required = _last_required([each.default for each in parameters])
    aliases = iter("abcdefgh")
    arguments = []
    for at, each in enumerate(parameters):
        kind = SCHEMA_TYPES[hints[each.name]]
        if each.name in mutates:
            kind = kind.replace("Tensor", f"Tensor({next(aliases)}!)")
        default = f"={each.default!r}" if at > last_required else ""
        arguments.append(f"{kind} {each.name}{default}")
    result = hints["return"]
    if typing.get_origin(result) is tuple:
        results = f"({', '.join(SCHEMA_TYPES[part] for part in typing.get_args(result))})"
    else:
        results = SCHEMA_TYPES[result]
    return f"({', '.join(arguments)}) -> {results}"


def directly(x: Tensor) -> bool:
    """Whether to call a Python implementation for x [...], of any shape, without the dispatcher, which costs the host
    as much as two kernels. Not where something must see the op: compilers, and tensor subclasses such as fake tensors.
    """
    return type(x) is Tensor and not x.is_meta and not torch.compiler.is_compiling()


def has_kernel_dtype(x: Tensor) -> bool:
    """The `kernel_if` of most ops: whether kernels serve the dtype of x [...], of any shape."""
    return x.dtype in KERNEL_DTYPES


def _positional(function: Callable[..., R]) -> Callable[..., R]:
    """The function with its keyword-only parameters by position as well: the dispatcher passes all of them so."""
    code = function.__code__
    if not code.co_kwonlyargcount:
        return function
    count = code.co_argcount + code.co_kwonlyargcount
    code = code.replace(co_argcount=count, co_posonlyargcount=0, co_kwonlyargcount=0)
    made = types.FunctionType(code, function.__globals__, function.__name__, None, function.__closure__)
    defaults = [each.default for each in inspect.signature(function).parameters.values()]
    made.__defaults__ = tuple(defaults[_last_required(defaults) + 1 :])
    return made


def _last_required(defaults: Sequence[object]) -> int:
    """The index of the last parameter that a schema has no default of, -1 where there is none."""
    missing = [
        at for at, each in enumerate(defaults) if each is inspect.Parameter.empty or isinstance(each, torch.dtype)
    ]
    return missing[-1] if missing else -1


def _dispatching(
    function: Callable[..., Any],
    overload: Any,
    reference: Callable[..., Any],
    kernel_if: Callable[..., bool] | None,
    of: Sequence[str],
    cuda: Callable[..., Any] | None,
) -> Any:
    """A function of the same parameters that calls kernel or reference with them. It is made from source, like a named
    tuple's methods: *args and **kwargs in its place cost half a microsecond a call.
    """
    code = function.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    positional, keyword_only = names[: code.co_argcount], names[code.co_argcount :]
    parameters = ", ".join((*positional, *(("*", *keyword_only) if keyword_only else ())))
    lines = [f"return (_overload if _kernel_if({', '.join(of)}) else _reference)({', '.join(names)})"]
    if kernel_if is None:
        lines = [f"return _overload({', '.join(names)})"]
    if cuda is not None:
        lines.insert(0, f"if {names[0]}.is_cuda and _directly({names[0]}): return _cuda({', '.join(names)})")
    source = "\n".join(
        (
            "def bind(_overload, _reference, _kernel_if, _cuda, _directly):",
            f"    def {function.__name__}({parameters}):",
            *(f"        {line}" for line in lines),
            f"    return {function.__name__}",
        )
    )
    namespace: dict[str, Any] = {}
    exec(compile(source, f"<op {function.__name__}>", "exec"), namespace)
    called = namespace["bind"](overload, reference, kernel_if, cuda, directly)
    called.__defaults__, called.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return called
