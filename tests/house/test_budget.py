"""The rules of size and shape, each with a sample that breaks it and one that keeps it."""

import ast
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from .source import PACKAGES, PYTHON, native_files, python_files, read, text_files, web_files

FILE_LINES, FUNCTION_LINES, CONFIG_FIELDS = 500, 80, 12
VAGUE_NAMES = {"util", "utils", "helper", "helpers", "manager", "managers", "misc"}
READ_ONLY_TYPES = {"Mapping", "Sequence", "Collection", "Iterable", "Set", "AbstractSet", "frozenset", "tuple"}
STATEFUL_CALLS = {
    *("dict", "list", "set", "bytearray", "defaultdict", "deque", "OrderedDict", "Counter", "ChainMap", "count"),
    *("WeakKeyDictionary", "WeakValueDictionary", "WeakSet", "Queue", "SimpleQueue", "ContextVar", "local"),
    *("Lock", "RLock", "Event", "Condition", "Semaphore", "Random", "Generator"),
}
STATE_ALLOWED: Mapping[str, str] = {
    "omni_grpc/types/log_lines.py:within": "a ContextVar: the call of one task, whose lines name its trace",
    "omni_grpc/nn/linear.py:active": "a ContextVar: the rows of one forward, set and reset around it, one per thread",
}
"""Module globals that may hold state, as `path:name`, each with its reason."""


def file_too_long(path: Path, text: str) -> Iterator[str]:
    lines = len(text.splitlines())
    if lines >= FILE_LINES:
        yield f"has {lines} lines, the limit is {FILE_LINES - 1}"


def function_too_long(path: Path, text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines >= FUNCTION_LINES:
                yield f"{node.lineno}: {node.name} has {lines} lines, the limit is {FUNCTION_LINES - 1}"


def config_too_wide(path: Path, text: str) -> Iterator[str]:
    """A section holds settings. The tree, whose fields are sections, is as wide as there are kinds of settings."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef) and node.name.endswith("Config"):
            annotations = [ast.unparse(field.annotation) for field in node.body if isinstance(field, ast.AnnAssign)]
            fields = sum(not re.fullmatch(r"\w+Config( \| None)?", annotation) for annotation in annotations)
            if fields > CONFIG_FIELDS:
                yield f"{node.lineno}: {node.name} has {fields} fields, the limit is {CONFIG_FIELDS}"


def error_swallowed(path: Path, text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ExceptHandler) and _is_broad(node.type) and all(map(_does_nothing, node.body)):
            yield f"{node.lineno}: catches everything and does nothing"


def _is_broad(kind: ast.expr | None) -> bool:
    return kind is None or (isinstance(kind, ast.Name) and kind.id in {"Exception", "BaseException"})


def _does_nothing(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Pass | ast.Continue) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    )


def state_in_globals(path: Path, text: str) -> Iterator[str]:
    """A container is constant where its annotation says so, because then mypy refuses to change it."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield f"{node.lineno}: global {', '.join(node.names)}"
    for statement in _module_statements(tree.body):
        for name, line in _stateful_names(statement):
            if name != "__all__" and f"{path}:{name}" not in STATE_ALLOWED:
                yield f"{line}: {name} holds state; annotate a constant as Mapping, Sequence or Set, or make it a field"


def _module_statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        if isinstance(statement, ast.If | ast.Try | ast.With):
            yield from _module_statements(child for child in ast.walk(statement) if isinstance(child, ast.Assign))
        else:
            yield statement


def _stateful_names(statement: ast.stmt) -> Iterator[tuple[str, int]]:
    match statement:
        case ast.Assign(targets=targets, value=value) if _is_stateful(value):
            yield from ((target.id, statement.lineno) for target in targets if isinstance(target, ast.Name))
        case ast.AnnAssign(target=ast.Name(id=name), annotation=kind, value=ast.expr() as value) if _is_stateful(value):
            if _outer_name(kind) not in READ_ONLY_TYPES:
                yield name, statement.lineno


def _is_stateful(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return _outer_name(value.func) in STATEFUL_CALLS
    return isinstance(value, ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp)


def _outer_name(node: ast.expr) -> str:
    """`Mapping` for `Mapping[str, int]`, `typing.Mapping` and `collections.abc.Mapping`; Final is looked through."""
    match node:
        case ast.Subscript(value=ast.Name(id="Final") | ast.Attribute(attr="Final"), slice=inner):
            return _outer_name(inner)
        case ast.Subscript(value=outer):
            return _outer_name(outer)
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""


def vague_name(path: Path, text: str) -> Iterator[str]:
    for part in (*path.parts[:-1], path.stem):
        if part in VAGUE_NAMES:
            yield f"{part!r} does not say what is in it"


def machine_path(path: Path, text: str) -> Iterator[str]:
    for match in re.finditer(r"(?<![\w.~$}-])/(?:tmp|home|root|work|Users)/\w+", text):
        yield f"names {match[0]}, a path of one machine"


def fancy_punctuation(path: Path, text: str) -> Iterator[str]:
    """Dashes, quotes, ellipsis, odd spaces: what editors put in and people cannot type or search for."""
    for number, line in enumerate(text.splitlines(), start=1):
        if match := re.search("[\u00a0\u2010-\u2015\u2018-\u201f\u2026]", line):
            yield f"{number}: has {match[0]!r} where ASCII will do"


@dataclasses.dataclass(frozen=True)
class Rule:
    check: Callable[[Path, str], Iterator[str]]
    scope: Callable[[], Iterable[Path]]
    broken: str
    kept: str
    path: str = "omni_grpc/sample.py"

    def __str__(self) -> str:
        return self.check.__name__


def code() -> list[Path]:
    return [*python_files(*PYTHON), *native_files(), *web_files(), Path("setup.py")]


def python() -> list[Path]:
    return [*python_files(*PYTHON), Path("setup.py")]


def packages() -> list[Path]:
    return list(python_files(*PACKAGES))


RULES = (
    Rule(file_too_long, code, broken="x = 1\n" * FILE_LINES, kept="x = 1\n" * (FILE_LINES - 1)),
    Rule(
        function_too_long,
        python,
        broken="class A:\n  async def f():\n" + "    x = 1\n" * (FUNCTION_LINES - 1),
        kept="def f():\n" + "    x = 1\n" * (FUNCTION_LINES - 2),
    ),
    Rule(
        config_too_wide,
        packages,
        broken="class AConfig:\n" + "".join(f"    f{i}: int = 0\n" for i in range(CONFIG_FIELDS + 1)),
        kept="class AConfig:\n    a: BConfig\n    b: BConfig | None = None\n"
        + "".join(f"    f{i}: int = 0\n" for i in range(CONFIG_FIELDS)),
    ),
    Rule(
        error_swallowed,
        python,
        broken="try:\n    f()\nexcept Exception:\n    pass\n",
        kept="try:\n    f()\nexcept OSError:\n    pass\nexcept Exception:\n    raise\n",
    ),
    Rule(
        state_in_globals,
        packages,
        broken="CACHE: dict[str, int] = {}\n",
        kept="TABLE: Mapping[str, int] = {}\n__all__ = ['f']\nLIMIT = 3\ndef f():\n    seen = {}\n",
    ),
    Rule(vague_name, code, broken="", kept="", path="omni_grpc/utils.py"),
    Rule(machine_path, text_files, broken="open('/home/me/weights')", kept="https://example.org/home/me, ~/work/x"),
    Rule(fancy_punctuation, text_files, broken="one \u2013 two", kept="one - two, caf\u00e9"),
)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_code_keeps_the_rule(rule: Rule) -> None:
    files = list(rule.scope())
    assert files
    assert [f"{path}: {finding}" for path in files for finding in rule.check(path, read(path))] == []


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_rule_can_fail(rule: Rule) -> None:
    assert list(rule.check(Path(rule.path), rule.broken))
    assert not list(rule.check(Path("omni_grpc/sample.py"), rule.kept))


@pytest.mark.parametrize(
    "broken",
    [
        "SEEN = []",
        "SEEN = {name: 1 for name in NAMES}",
        "LOCK = threading.Lock()",
        "if X:\n    SEEN = set()",
        "SEEN: Final[dict[str, int]] = {}",
        "SEEN: Final = collections.defaultdict(int)",
        "def f():\n    global SEEN",
    ],
)
def test_state_is_seen_in_every_form(broken: str) -> None:
    assert list(state_in_globals(Path("omni_grpc/sample.py"), broken))


def test_every_allowed_global_is_still_there() -> None:
    for entry in STATE_ALLOWED:
        path, name = entry.split(":")
        assert re.search(rf"^{name}\b", read(Path(path)), re.MULTILINE), entry
