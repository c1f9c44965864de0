"""Every host of a launch must be able to read all prepared data."""

from __future__ import annotations

from pathlib import Path

from megasdc.launcher.plan import LaunchRequest, make_plan

BLEND = Path(__file__).parents[3] / "configs" / "blend.json"


def test_every_folder_of_a_blend_is_looked_for(tmp_path, monkeypatch):
    """The plan lists the folders of all parts among what a host reads, below the working folder."""
    monkeypatch.chdir(tmp_path)
    plan = make_plan(LaunchRequest(BLEND, num_gpus=2), lambda text: None)
    folders = [str(tmp_path / "prepared" / name) for name in ("stdlib_modules", "stdlib_packages")]
    assert plan.needs.readable[-2:] == folders
    alone = make_plan(LaunchRequest(BLEND, num_gpus=2, overrides=("megasdc.data.blend=[]",)), lambda text: None)
    assert alone.needs.readable[-1:] == folders[:1] and folders[1] not in alone.needs.readable
