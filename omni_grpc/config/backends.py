"""Attention backends: one table of what exists, what each one needs and how it is called, and how one is chosen.

Data alone: the server reads it without torch, and `ops.attention` runs it. docs/adding-a-feature.md says how to add
one.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.metadata
import importlib.util
import re
from collections.abc import Mapping

from omni_grpc.types.errors import ConfigError, Violation

AUTO = "auto"
SETTING = "diffusion_attention_backend"
HALF = frozenset({"float16", "bfloat16"})
Capability = tuple[int, int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One way to compute attention over packed rows.

    run: import string of its function, see `ops.attention_kernels`. what: one line for people.
    apart: the same for its function that makes one call for each run of rows of equal lengths, where `run` makes one
    for all of them. quantized, quantized_apart: the same for those that take `ops.heads.QuantizedHeads`.
    tiles: whether it reads what `ops.rope_tiles` makes.
    package: a module that has to be there besides torch, install: how to get it, least: the first version that will do.
    kernel: an op that the op library has to have a kernel of, where it was built with one.
    devices: types of device. capability: lowest and highest compute capability, both included.
    dtypes: empty where it takes any. head_multiple, head_most: of head sizes. causal, grouped: whether it does causal
    and grouped-query attention. lossy: whether its result is further off than its dtype's rounding. seeps:
    whether `run` lets what is not finite in a row into the row before it. parts: whether it gives the log-sum-exp of a
    part of the keys, by which a ring of ranks merges parts, see `ops.attention_parts`.

    A mask of keys is no need of a backend: rows are packed by it before.
    """

    run: str
    what: str
    apart: str = ""
    quantized: str = ""
    quantized_apart: str = ""
    tiles: bool = False
    package: str = ""
    kernel: str = ""
    install: str = ""
    least: tuple[int, ...] = ()
    devices: tuple[str, ...] = ("cuda",)
    capability: tuple[Capability, Capability] | None = None
    dtypes: frozenset[str] = frozenset()
    head_multiple: int = 1
    head_least: int = 1
    head_most: int | None = None
    causal: bool = True
    grouped: bool = True
    lossy: bool = False
    seeps: bool = False
    parts: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """What attention is needed for: the type of device and its compute capability (None: it has none), and the shape.
    kernels: the ops that have a kernel on that device.
    """

    device: str
    capability: Capability | None
    dtype: str
    head_size: int
    causal: bool = False
    grouped: bool = False
    kernels: frozenset[str] = frozenset()


_KERNELS = "omni_grpc.ops.attention_kernels"
BACKENDS: Mapping[str, Backend] = {
    "TORCH_SDPA": Backend(
        run=f"{_KERNELS}:sdpa",
        parts=True,
        what="torch's scaled_dot_product_attention, one call for each run of rows of equal lengths",
        devices=(),
    ),
    "OMNI_CPU": Backend(
        run="omni_grpc.ops.attention_cpu:packed",
        what="our own CPU kernel, one call for all rows",
        kernel="attention_cpu",
        install="build the op library with a C++ compiler: make setup",
        devices=("cpu",),
        dtypes=frozenset({"float32", "bfloat16"}),
    ),
    "CUDNN_ATTN": Backend(
        run=f"{_KERNELS}:cudnn",
        what="cuDNN through torch, one call for each run of rows of equal lengths",
        capability=((8, 0), (12, 1)),
        dtypes=HALF,
        head_multiple=8,
        head_most=128,
    ),
    "FLASH_ATTN_3": Backend(
        run=f"{_KERNELS}:flash_3",
        parts=True,
        seeps=True,
        apart=f"{_KERNELS}:flash_3_apart",
        what="FlashAttention 3 from the package fa3-fwd, one call for all rows",
        package="fa3_fwd_interface",
        install='pip install "omni-grpc[gpu]"',
        capability=((9, 0), (9, 0)),
        dtypes=frozenset({"bfloat16"}),
        head_multiple=8,
        head_most=256,
    ),
    "FLASH_ATTN_3_FP8": Backend(
        run=f"{_KERNELS}:flash_3_fp8",
        apart=f"{_KERNELS}:flash_3_fp8_apart",
        quantized=f"{_KERNELS}:flash_3_quantized",
        quantized_apart=f"{_KERNELS}:flash_3_quantized_apart",
        seeps=True,
        what="FlashAttention 3 in FP8: queries, keys, values and softmax weights in e4m3, one call for all rows",
        package="fa3_fwd_interface",
        install='pip install "omni-grpc[gpu]"',
        capability=((9, 0), (9, 0)),
        dtypes=frozenset({"bfloat16", "float32"}),
        head_multiple=16,
        head_most=256,
        lossy=True,
    ),
    "FP8_EMULATION": Backend(
        run=f"{_KERNELS}:fp8_emulated",
        quantized=f"{_KERNELS}:quantized_reference",
        what="the arithmetic of FLASH_ATTN_3_FP8 in software, to judge its quality on a CPU",
        devices=("cpu",),
        lossy=True,
    ),
    "OMNI_INT8": Backend(
        run=f"{_KERNELS}:int8",
        tiles=True,
        what="our own INT8 kernel: queries and keys in int8, values and weights in e4m3, one call for all rows",
        kernel="attention_q",
        install="build the op library with nvcc, for 90a",
        capability=((9, 0), (9, 0)),
        dtypes=frozenset({"bfloat16", "float32"}),
        head_multiple=128,
        head_most=128,
        causal=False,
        lossy=True,
    ),
    "INT8_EMULATION": Backend(
        run=f"{_KERNELS}:int8",
        tiles=True,
        what="the arithmetic of OMNI_INT8 in software, to judge its quality on a CPU",
        devices=("cpu",),
        head_most=128,
        causal=False,
        lossy=True,
    ),
    "FLASH_ATTN_2": Backend(
        run=f"{_KERNELS}:flash_2",
        parts=True,
        what="FlashAttention 2 from torch, one call for all rows",
        capability=((8, 0), (12, 1)),
        dtypes=HALF,
        head_multiple=8,
        head_most=256,
    ),
    "SAGE_ATTN": Backend(
        run=f"{_KERNELS}:sage",
        what="SageAttention: queries and keys in 8 bits, one call for each run of rows of equal lengths",
        package="sageattention",
        install="from source, github.com/thu-ml/SageAttention: the PyPI version is wrong for many row lengths",
        least=(2, 1, 1),
        capability=((8, 0), (12, 1)),
        dtypes=HALF,
        head_multiple=32,
        head_least=64,
        head_most=128,
        causal=False,
        lossy=True,
    ),
}
"""By name. An empty `devices` is any device."""

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "FLASH_ATTN": ("FLASH_ATTN_3", "FLASH_ATTN_2"),
    "FP8_ATTN": ("FLASH_ATTN_3_FP8", "FP8_EMULATION"),
    "INT8_ATTN": ("OMNI_INT8", "INT8_EMULATION"),
}
"""Names that stand for several backends; the first one that can run is used."""

EIGHT_BIT: Mapping[str, Mapping[str, str]] = {
    "fp8": {
        AUTO: "FP8_ATTN",
        "FLASH_ATTN": "FLASH_ATTN_3_FP8",
        "FLASH_ATTN_3": "FLASH_ATTN_3_FP8",
        **{name: name for name in ("FP8_ATTN", "FLASH_ATTN_3_FP8", "FP8_EMULATION")},
    },
    "int8": {AUTO: "INT8_ATTN", **{name: name for name in ("INT8_ATTN", "OMNI_INT8", "INT8_EMULATION")}},
}
"""Precisions beside the dtypes of queries, keys and values: what a backend is called in each."""

DEFAULTS: Mapping[str, tuple[str, ...]] = {
    "cuda": ("FLASH_ATTN_3", "FLASH_ATTN_2", "TORCH_SDPA"),
    "cpu": ("OMNI_CPU", "TORCH_SDPA"),
}
"""What "auto" is on a platform: the first that can run. cuDNN makes a plan for each new shape: it has to be named."""

COMPARED: Mapping[str, tuple[str, ...]] = {"FLASH_ATTN_2": ("CUDNN_ATTN",)}
"""What "auto" takes in the place of its first choice where it was measured to be faster. cuDNN, to which torch's SDPA
leaves half precision on Hopper, makes a plan for each new shape: FlashAttention 3, which is as fast, makes none.
"""

APART, TOGETHER = " apart", " together"
"""Forms of a backend, added to its name: one call for each run of rows of equal lengths, one for all rows."""

INVARIANT = " invariant"
"""The form whose rows come out alike in any batch, bit for bit, and whatever is in other rows: one call for each row,
but of kernels that compute every row of a call as if it were alone.
"""

ALIASES: Mapping[str, str] = {
    "SDPA": "TORCH_SDPA",
    "NATIVE": "TORCH_SDPA",
    "CUDNN": "CUDNN_ATTN",
    "_NATIVE_CUDNN": "CUDNN_ATTN",
    "FLASH": "FLASH_ATTN",
    "FLASH_ATTENTION": "FLASH_ATTN",
    "FA2": "FLASH_ATTN_2",
    "FA3": "FLASH_ATTN_3",
    "_FLASH_3": "FLASH_ATTN_3",
    "SAGE": "SAGE_ATTN",
}
"""Other names, some of them diffusers' -> our names."""

ELSEWHERE: Mapping[str, str] = {
    "FLASHINFER_ATTN": "FLASH_ATTN",
    "TRTLLM_ATTN": "FLASH_ATTN",
    "FLASH_ATTN_4": "FLASH_ATTN",
    "FA4": "FLASH_ATTN",
    "FLASH_4_HUB": "FLASH_ATTN",
    "FLASH_ATTN_HUB": "FLASH_ATTN_2",
    "FLASH_ATTN_3_HUB": "FLASH_ATTN_3",
    "SAGE_ATTN_3": "SAGE_ATTN",
    "FASTVIDEO_VSA": "FLASH_ATTN",
    "RAINFUSION_ATTN": "FLASH_ATTN",
}
"""Backends of vLLM-Omni and diffusers that are not supported yet, and the nearest ones here."""


def names() -> tuple[str, ...]:
    """Every value of the setting, except aliases."""
    return (AUTO, *FAMILIES, *BACKENDS)


def canonical(name: object, field: str = SETTING) -> str:
    """A backend's name as the table has it; case does not matter. Raises ConfigError for one that it does not have."""
    flag = flag_of(field)
    asked = name.upper() if isinstance(name, str) else ""
    asked = AUTO if asked == AUTO.upper() else ALIASES.get(asked, asked)
    if asked in names():
        return asked
    if asked in ELSEWHERE:
        raise refused(
            field, f"{flag} is {name!r}: not supported yet; the nearest is {ELSEWHERE[asked]}", "NOT_SUPPORTED"
        )
    close = difflib.get_close_matches(asked, (*names(), *ALIASES), n=1)
    hint = f"; did you mean {ALIASES.get(close[0], close[0])}?" if close else ""
    raise refused(field, f"{flag} is {name!r}: expected one of {', '.join(names())}{hint}")


def flag_of(field: str) -> str:
    """A setting, or a path in one, as a flag has it: "diffusion_attention_config.per_role" with dashes in its name."""
    name, dot, path = field.partition(".")
    return "--" + name.replace("_", "-") + dot + path


def refused(field: str, message: str, reason: str = "BAD_CONFIGURATION") -> ConfigError:
    return ConfigError(message, reason=reason, violations=(Violation(field, message),))


def candidates(name: str, device: str) -> tuple[str, ...]:
    """The backends that a name stands for on a type of device, the best first."""
    if name == AUTO:
        return DEFAULTS.get(device, ("TORCH_SDPA",))
    return FAMILIES.get(name, (name,))


def in_precision(name: str, precision: str, field: str = SETTING) -> str:
    """The backend of a canonical name, with or without a form, in a precision. Raises ConfigError (NOT_SUPPORTED) for
    one without that precision.
    """
    forms = EIGHT_BIT.get(precision)
    if forms is None:
        return name
    plain, space, form = name.partition(" ")
    if plain not in forms:
        has = ", ".join(each for each in forms if each not in forms.values())
        message = f"{flag_of(field)} {plain} does not support {precision} yet; use {has}"
        raise refused(field, message, "NOT_SUPPORTED")
    return forms[plain] + space + form


def choose(name: str, use: Use, field: str = SETTING) -> str:
    """The first backend that a canonical name stands for and that can run; the name may have a form. Raises ConfigError
    (ATTENTION_UNAVAILABLE) if none can, with what each of them lacks.
    """
    lacks = {}
    for candidate in candidates(name.partition(" ")[0], use.device):
        lacks[candidate] = lack(BACKENDS[candidate], use)
        if not lacks[candidate]:
            return candidate
    why = "; ".join(f"{candidate} {reason}" for candidate, reason in lacks.items())
    message = f"{flag_of(field)} {name} is not available here: {why}. Use {AUTO!r} to choose one automatically"
    raise refused(field, message, "ATTENTION_UNAVAILABLE")


def kernels_of(name: str, use: Use) -> tuple[str, ...]:
    """The candidate kernels of a canonical name: backends with their forms, best guess first. The fastest one for a
    shape is used. Raises ConfigError like `choose`.
    """
    plain, _, form = name.partition(" ")
    found = [choose(name, use)]
    if form:
        return (f"{found[0]} {form}",)
    if plain == AUTO:
        found += [each for each in COMPARED.get(found[0], ()) if not lack(BACKENDS[each], use)]
    return tuple(each + form for each in found for form in ((TOGETHER, APART) if BACKENDS[each].apart else ("",)))


def kernel_for(kernel: str, quantized: bool = False) -> str:
    """The import string of the function for one of `kernels_of`; quantized: the one that takes QuantizedHeads."""
    name, _, form = kernel.partition(" ")
    backend = BACKENDS[name]
    together, apart = (backend.quantized, backend.quantized_apart) if quantized else (backend.run, backend.apart)
    return apart if apart and form != TOGETHER.strip() and form else together


def lack(backend: Backend, use: Use) -> str:
    """Why a backend cannot serve a use, with the fix if there is one; empty if it can."""
    if backend.devices and use.device not in backend.devices:
        return f"runs on {', '.join(backend.devices)}, not on {use.device}"
    if backend.capability is not None and use.capability is not None:
        low, high = backend.capability
        if not low <= use.capability <= high:
            has, least, most = (".".join(map(str, each)) for each in (use.capability, low, high))
            return (
                f"needs compute capability {least if low == high else f'{least} to {most}'}, but this device has {has}"
            )
    if backend.dtypes and use.dtype not in backend.dtypes:
        dtypes = " or ".join(sorted(backend.dtypes))
        return f"needs {dtypes}, not {use.dtype} (use --dtype bfloat16, or precision bf16 for its role)"
    largest = backend.head_most or use.head_size
    if use.head_size % backend.head_multiple or not backend.head_least <= use.head_size <= largest:
        lowest = f" from {backend.head_least}" if backend.head_least > 1 else ""
        most = f" up to {backend.head_most}" if backend.head_most else ""
        sizes = f"multiples of {backend.head_multiple}{lowest}{most}"
        return f"supports head sizes that are {sizes}, not {use.head_size}"
    if use.causal and not backend.causal:
        return "does not support causal attention"
    if use.grouped and not backend.grouped:
        return "does not support grouped-query attention"
    if backend.kernel and backend.kernel not in use.kernels:
        return f"needs an op library that contains its kernel ({backend.install})"
    if backend.package and importlib.util.find_spec(backend.package) is None:
        return f"needs the package {backend.package} ({backend.install})"
    if backend.least:
        has = importlib.metadata.version(backend.package)
        if tuple(map(int, re.findall(r"\d+", has)[: len(backend.least)])) < backend.least:
            least = ".".join(map(str, backend.least))
            return f"needs {backend.package} {least}, but {has} is installed ({backend.install})"
    return ""
