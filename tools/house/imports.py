"""Python files of a package, and which of them each imports; read from the sources, nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

Graph = Mapping[str, frozenset[str]]
"""For each node the others that it needs."""


@dataclass(frozen=True)
class File:
    """A Python file.

    Args:
        module: its dotted name; of an ``__init__`` that of its folder.
        path: where it lies.
        lines: number of its lines.
        import_lines: number of lines of its import statements, wherever they stand.
        imports: names of the modules of the package that it imports, also in functions and for types alone.
        names: its public classes and functions, top level.
    """

    module: str
    path: Path
    lines: int
    import_lines: int
    imports: frozenset[str]
    names: frozenset[str]

    @property
    def is_init(self) -> bool:
        """Whether it is the ``__init__`` of a folder."""
        return self.path.name == "__init__.py"

    @property
    def folder(self) -> str:
        """Dotted name of its folder."""
        return self.module if self.is_init else self.module.rpartition(".")[0]


def read_package(folder: Path) -> dict[str, File]:
    """Every file of a package by its module.

    Args:
        folder: the package's; its name is that of the package.

    Raises:
        ValueError: there is no package, or a file is no Python.
    """
    if not (folder / "__init__.py").is_file():
        raise ValueError(
            f"{folder}: no __init__.py there, but a package is needed; give the name of one with --package"
        )
    paths = {_module_of(path, folder.parent): path for path in sorted(folder.rglob("*.py"))}
    return {module: _read(module, path, paths) for module, path in paths.items()}


def imports_of(path: Path, package: str, modules: Mapping[str, Path]) -> frozenset[str]:
    """Names of modules that a file imports; ``from a import b`` is the module a.b where there is one, else a.

    Args:
        package: dotted name of the folder of the file, at which its relative imports begin.
        modules: files by the names that count.
    """
    return frozenset(_imported(_parse(path), package, modules))


def _parse(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: no Python of this interpreter: {error}; mend the file") from error


def _module_of(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _read(module: str, path: Path, modules: Mapping[str, Path]) -> File:
    tree = _parse(path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    lines = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    names = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)}
    return File(
        module=module,
        path=path,
        lines=len(path.read_text(encoding="utf-8").splitlines()),
        import_lines=len(lines),
        imports=frozenset(_imported(tree, package, modules)) - {module},
        names=frozenset(name for name in names if not name.startswith("_")),
    )


def _imported(tree: ast.Module, package: str, modules: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in modules else base for alias in node.names]
        else:
            continue
        yield from (name for name in names if name in modules)


def circles_of(graph: Graph) -> list[list[str]]:
    """Groups of nodes that all reach one another, the largest first; a node that reaches only itself is none."""
    reach = {node: reachable(graph, node) for node in graph}
    groups = {
        frozenset(other for other in reach[node] if node in reach[other]) for node in graph if node in reach[node]
    }
    return sorted((sorted(group) for group in groups if len(group) > 1), key=lambda group: (-len(group), group))


def reachable(graph: Graph, start: str) -> set[str]:
    """Nodes to which a way of one or more arrows leads."""
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        fresh = graph[waiting.pop()] - reached
        reached |= fresh
        waiting += fresh
    return reached
