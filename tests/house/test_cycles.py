"""No module of the package imports itself by a detour, not even where an import is hidden in a function."""

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

from .source import ROOT


def test_the_package_has_no_import_cycle() -> None:
    graph = import_graph(ROOT / "omni_grpc")
    assert len(graph) > 10
    assert find_cycle(graph) is None


def test_a_cycle_is_found(tmp_path: Path) -> None:
    package = tmp_path / "sample"
    write(package, "__init__.py", "")
    write(package, "a.py", "from sample.sub import b\n")
    write(package, "sub/__init__.py", "from . import b\n")
    write(package, "sub/b.py", "def f():\n    import sample.a\n")
    assert sorted(set(find_cycle(import_graph(package)) or [])) == ["sample.a", "sample.sub.b"]


def test_an_import_for_types_alone_is_no_cycle(tmp_path: Path) -> None:
    package = tmp_path / "sample"
    write(package, "__init__.py", "from sample.a import x\n")
    write(package, "a.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import b\n")
    write(package, "b.py", "from .a import x\n")
    assert find_cycle(import_graph(package)) is None


def test_a_package_that_imports_its_user_is_a_cycle(tmp_path: Path) -> None:
    package = tmp_path / "sample"
    write(package, "__init__.py", "from .a import x\n")
    write(package, "a.py", "from sample import y\n")
    assert sorted(set(find_cycle(import_graph(package)) or [])) == ["sample", "sample.a"]


def write(package: Path, name: str, text: str) -> None:
    path = package / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def find_cycle(graph: dict[str, set[str]]) -> list[str] | None:
    """One cycle as the names along it, or None."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        cycle: list[str] = error.args[1]
        return cycle
    return None


def import_graph(package: Path) -> dict[str, set[str]]:
    """For every module below `package`, which others it names in import statements, wherever these stand."""
    modules: dict[str, Path] = {}
    for path in module_files(package):
        parts = path.relative_to(package.parent).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return {name: set(imports_of(name, path, modules)) - {name} for name, path in modules.items()}


def module_files(folder: Path) -> Iterator[Path]:
    """Like rglob, but through the models symlink, which some Pythons do not follow."""
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            yield from module_files(path)
        elif path.suffix == ".py":
            yield path


def imports_of(name: str, path: Path, modules: dict[str, Path]) -> Iterator[str]:
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in runtime_nodes(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) + 1 - node.level]) if node.level else ""
            origin = ".".join(filter(None, (base, node.module)))
            for alias in node.names:
                # from package import name: the module of that name where there is one, else the package itself
                yield from [target for target in (f"{origin}.{alias.name}", origin) if target in modules][:1]


def runtime_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Every node below, except the bodies of `if TYPE_CHECKING:`."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            for other in child.orelse:
                yield from runtime_nodes(other)
        else:
            yield from runtime_nodes(child)
