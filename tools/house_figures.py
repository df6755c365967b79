"""Prints figures of the code, so that its structure can be followed over time. `make house` runs it; it judges nothing.

Counted is what is written by hand in omni_grpc/ and models/. A room is a folder or a loose module of omni_grpc, and
models; an arrow is a pair of rooms of which one imports the other. `--list` names what each figure counts.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "omni_grpc"
NOT_BY_HAND = ("v1", "models")
"""Folders of omni_grpc: generated stubs, and the symlink to models/."""
FILE_LINES, FUNCTION_LINES = 500, 80
TENSOR = re.compile(r"\b(torch\.)?Tensor\b")
SHAPE = re.compile(r"\[[^\]\n]*\]")
"""A bracket such as `[tokens, channels]`, or `[T, C]`."""
ENTRY_POINTS = {"__init__.py", "__main__.py"}

Modules = Mapping[Path, ast.Module]
Function = ast.FunctionDef | ast.AsyncFunctionDef


def main() -> None:
    parser = argparse.ArgumentParser(description="print figures of the code", allow_abbrev=False)
    parser.add_argument("--list", action="store_true", help="name what each figure counts")
    options = parser.parse_args()
    for name, counted in figures(ROOT).items():
        size = counted if isinstance(counted, int) else len(counted)
        print(f"{size:7,}  {name}")
        if options.list and not isinstance(counted, int):
            print(*(f"           {item}" for item in counted), sep="\n")


def figures(root: Path) -> dict[str, int | list[str]]:
    """Each figure by its name: a number, or what is counted."""
    modules = {path.relative_to(root): ast.parse(path.read_text(encoding="utf-8")) for path in sources(root)}
    lines = {path: len((root / path).read_text(encoding="utf-8").splitlines()) for path in modules}
    takers = list(tensor_takers(modules))
    loose = [path.name for path in modules if path.parts[0] == PACKAGE and is_loose(path)]
    pairs = arrows(modules)
    return {
        f"loose files in {PACKAGE}/": sorted(set(loose) - ENTRY_POINTS),
        "rooms": sorted({room_of(path) for path in modules} - {""}),
        "arrows between rooms": sorted(f"{importer} -> {imported}" for importer, imported in pairs),
        "pairs of rooms that import each other": [f"{a}, {b}" for a, b in sorted(pairs) if a < b and (b, a) in pairs],
        f"lines of {PACKAGE}/": sum(count for path, count in lines.items() if path.parts[0] == PACKAGE),
        "lines of models/": sum(count for path, count in lines.items() if path.parts[0] == "models"),
        "type names with more than one definition": repeated_names(modules),
        "public functions that take a tensor": [name for name, _ in takers],
        "public functions that take a tensor, without a docstring": [name for name, text in takers if text is None],
        "public functions that take a tensor, whose docstring gives no shape": [
            name for name, text in takers if text is not None and not SHAPE.search(text)
        ],
        f"functions of {FUNCTION_LINES} lines or more": long_functions(modules),
        f"files of {FILE_LINES} lines or more": [f"{path}: {n}" for path, n in lines.items() if n >= FILE_LINES],
    }


def sources(root: Path) -> Iterator[Path]:
    for path in sorted((root / PACKAGE).rglob("*.py")):
        if path.relative_to(root / PACKAGE).parts[0] not in NOT_BY_HAND:
            yield path
    yield from sorted((root / "models").rglob("*.py"))


def is_loose(path: Path) -> bool:
    return len(path.parts) == 2


def room_of(path: Path) -> str:
    """The room of a file, by its path from the root; empty for what belongs to none: the package's own entry points."""
    if path.parts[0] == "models":
        return "models"
    if is_loose(path):
        return "" if path.name in ENTRY_POINTS else path.stem
    return path.parts[1]


def arrows(modules: Modules) -> set[tuple[str, str]]:
    """Pairs (importer, imported) of two different rooms."""
    rooms = {room_of(path) for path in modules} - {""}
    found = {(room_of(path), target) for path, module in modules.items() for target in imported_rooms(path, module)}
    return {(importer, imported) for importer, imported in found if importer and imported in rooms - {importer}}


def imported_rooms(path: Path, module: ast.Module) -> Iterator[str]:
    """The second part of each name of the package that a module imports, anywhere in it."""
    package = [PACKAGE, *path.parts[:-1]] if path.parts[0] == "models" else list(path.parts[:-1])
    for node in ast.walk(module):
        names: Sequence[str] = ()
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *filter(None, [node.module])])
            names = [f"{prefix}.{alias.name}" for alias in node.names]
        yield from (name.split(".")[1] for name in names if name.startswith(f"{PACKAGE}."))


def repeated_names(modules: Modules) -> list[str]:
    """Public classes and module-level type aliases that several files define, with the files."""
    places: dict[str, list[str]] = defaultdict(list)
    for path, module in modules.items():
        for name in sorted(set(type_names(module))):
            places[name].append(str(path))
    return [f"{name}: {', '.join(files)}" for name, files in sorted(places.items()) if len(files) > 1]


def type_names(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name
    for statement in module.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Subscript() | ast.BinOp() | ast.Attribute()):
                if re.fullmatch(r"[A-Z][a-z]\w*", name):
                    yield name
            case ast.AnnAssign(target=ast.Name(id=name), annotation=kind) if ast.unparse(kind).endswith("TypeAlias"):
                yield name


def tensor_takers(modules: Modules) -> Iterator[tuple[str, str | None]]:
    """Public functions and methods with a tensor among their arguments, and their docstrings."""
    for path, module in modules.items():
        for name, function in public_functions(module):
            arguments = function.args
            given = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            if any(argument.annotation and TENSOR.search(ast.unparse(argument.annotation)) for argument in given):
                yield f"{path}:{function.lineno} {name}", ast.get_docstring(function)


def public_functions(scope: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[tuple[str, Function]]:
    for node in scope.body:
        if isinstance(node, Function) and not node.name.startswith("_"):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public_functions(node, f"{prefix}{node.name}.")


def long_functions(modules: Modules) -> list[str]:
    found: list[str] = []
    for path, module in modules.items():
        for node in (node for node in ast.walk(module) if isinstance(node, Function)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            found += [f"{path}:{node.lineno} {node.name}: {length}"] if length >= FUNCTION_LINES else []
    return found


if __name__ == "__main__":
    main()
