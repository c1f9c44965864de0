"""Names that users' programs import: each stays at every address under which it was documented."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

import megasdc

ROOT = Path(__file__).parents[2]
ADDRESSES = {
    "megasdc": [
        *("attach", "check_settings", "Field", "GradientHook", "GradientPart", "Hook", "read_events", "read_sweep"),
    ],
    "megasdc.events": ["read_events"],
    "megasdc.experiments.results": ["read_sweep"],
    "megasdc.optim.hooks": ["GradientHook", "GradientPart"],
}


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in ADDRESSES.items() for name in names])
def test_documented_names_stay(module: str, name: str) -> None:
    """All addresses of a name lead to the same object."""
    assert getattr(import_module(module), name) is getattr(megasdc, name)


def test_the_docs_import_no_other_name() -> None:
    """What README and docs import of the package is one of these names."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    lines = re.findall(r"^from (megasdc[\w.]*) import (.+)$", text, re.MULTILINE)
    assert lines and all(set(names.split(", ")) <= set(ADDRESSES.get(module, ())) for module, names in lines)


def test_another_name_is_refused() -> None:
    """The package has no other attribute."""
    with pytest.raises(AttributeError, match="no attribute 'attach_all'"):
        megasdc.attach_all  # noqa: B018
