"""Sizes of folders and functions. Files have none: one concept is one file, as long as it needs."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = [path for folder in ("megasdc", "tools") for path in sorted((ROOT / folder).rglob("*.py"))]
MANY_PARAMETERS = {"_bound_kernel": "a Triton kernel"}


def test_folders_are_small() -> None:
    """No folder has more than 25 files."""
    crowded = {str(folder): count for folder, count in Counter(path.parent for path in FILES).items() if count > 25}
    assert not crowded


def test_functions_are_short() -> None:
    """None is longer than 80 lines, nine of ten have at most 30; none but those named takes more than 8 parameters."""
    functions = [
        (path, node)
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    lengths = sorted((node.end_lineno or 0) - node.lineno + 1 for _, node in functions)
    assert lengths[int(0.9 * len(lengths))] <= 30
    assert not [f"{path}: {node.name}" for path, node in functions if (node.end_lineno or 0) - node.lineno >= 80]
    found = {
        node.name
        for _, node in functions
        if sum(one.arg not in ("self", "cls") for one in (*node.args.args, *node.args.kwonlyargs)) > 8
    }
    assert found == MANY_PARAMETERS.keys()


def test_variables_of_the_environment_have_one_meaning() -> None:
    """Two constants with one name would hand a process what is meant for another."""
    names = [name for file in FILES for name in re.findall(r'^[A-Z_]+ = "(MEGASDC_[A-Z_]+)"', file.read_text(), re.M)]
    assert len(names) > 10 and not [name for name, count in Counter(names).items() if count > 1]
