"""Names that users' programs import: each stays at every address under which it was documented."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest
import torch

import megasdc
from megasdc.common.errors import CheckpointError, ConfigError, LaunchError

ROOT = Path(__file__).parents[2]
ADDRESSES = {
    "megasdc": [
        *("attach", "compare", "load_weights", "Hook", "check_settings", "Field", "GradientHook", "GradientPart"),
        *("read_events", "read_sweep"),
    ],
    "megasdc.api": ["attach", "compare", "load_weights"],
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


def test_training_is_a_function_and_a_room(tmp_path: Path) -> None:
    """``megasdc.train`` is called also after its modules were imported; it refuses ranks, and tells what is wrong."""
    import megasdc.train.main as room

    assert megasdc.train.main is room
    with pytest.raises(ConfigError, match="nothing_there"):
        megasdc.train(tmp_path / "nothing_there.json")
    with pytest.raises(ConfigError, match=r"megasdc\.training\.step\b"):
        megasdc.train({"megasdc": {"training": {"step": 3}, "logging": {"run_dir": str(tmp_path / "run")}}})
    assert not (tmp_path / "run").exists()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(LaunchError, match="is a rank of a launch"):
        patch.setenv("RANK", "1")
        megasdc.train(tmp_path / "nothing_there.json")


def test_what_could_not_be_compared_is_no_agreement(tmp_path: Path) -> None:
    """Nothing to compare with is a wrong call; what cannot be read is an error, not a difference."""
    with pytest.raises(ValueError, match="two or more"):
        megasdc.compare(tmp_path)
    with pytest.raises(CheckpointError, match="is not there"):
        megasdc.compare(tmp_path / "a", tmp_path / "b")
    torch.save({"weight": torch.arange(4.0)}, tmp_path / "a.pt")
    torch.save({"weight": torch.tensor([0.0, 1.0, 2.0, 5.0])}, tmp_path / "b.pt")
    report = megasdc.compare(tmp_path / "a.pt", str(tmp_path / "b.pt"))
    assert not report.same and [one["fqn"] for one in report.as_dict()["findings"]] == ["weight"]
    assert megasdc.compare(tmp_path / "a.pt", tmp_path / "b.pt", rtol=1.0).same
