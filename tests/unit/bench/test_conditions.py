"""Conditions of the sweeps after Pei et al.: every cell is published, mapped and run, and what differs is told."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megasdc.common.errors import DataError
from tools.bench import conditions, figures
from tools.bench.conditions import SIZES, SWEEPS_TOLD, Conditions, cells_of, mapped, published_cells, render

LR = "optimizer.params.lr"


@pytest.fixture(name="sweeps")
def _sweeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with copies of the sweeps that the page tells of."""
    for name in SWEEPS_TOLD:
        shutil.copy(conditions.SWEEPS / f"{name}.json", tmp_path)
    monkeypatch.setattr(conditions, "SWEEPS", tmp_path)
    return tmp_path


def change(path: Path, cell: str | None, **values: object) -> None:
    """Set values of a sweep's file, of one cell or of all."""
    raw = json.loads(path.read_text(encoding="utf-8"))
    place = raw if cell is None else next(one for one in raw["cells"] if one["name"] == cell)
    place.setdefault("set", {}).update({name.replace("__", "."): value for name, value in values.items()})
    path.write_text(json.dumps(raw), encoding="utf-8")


def test_the_mapping_is_that_of_the_page() -> None:
    """Rates are doubled, absolute bounds are 35 times as large, steps are in proportion: 1750 of 5000 are 84 of 240."""
    published = Conditions(5e-4, 0.95, (512, 2048), (2304, 24), 1750, 5000, None, ("absolute", 1e-3))
    assert mapped(published) == Conditions(1e-3, 0.95, (8, 128), (128, 4), 84, 240, None, ("absolute", 0.035))
    later = Conditions(2e-3, 0.99, (512, 2048), (6144, 12), 1750, 6000, 3000, ("spike_aware", 100))
    assert mapped(later) == Conditions(4e-3, 0.99, (8, 128), (192, 2), 70, 240, 120, ("spike_aware", 100))


def test_all_cells_are_run_as_mapped_but_for_the_batch() -> None:
    """At every size; but in two sweeps the paper halves its batch, and ours is not halved."""
    for size in SIZES:
        names = [name for name in SWEEPS_TOLD if size != "cpu_2x2" or name in ("pei_table_1", "pei_tables_2_3")]
        wrong = {name: {cell.differing for cell in cells_of(name, size)} for name in names}
        halved = ("pei_skip_nan", "pei_model_size") if size == "cpu" else ()
        assert wrong == {name: {("batch",)} if name in halved else {()} for name in names}


def test_a_cell_that_is_run_otherwise_is_bold_and_named(sweeps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the rate of a sweep, or with theta, warm-up and start of one cell; the page then differs from the files."""
    page = figures.ROOT / "docs" / "results" / "pei-2025.md"
    monkeypatch.setattr(figures, "DATA", page.parent / "data")
    assert len(set(figures.fresh(page))) == 1
    change(sweeps / "pei_model_size.json", None, optimizer__params__lr=2e-3)
    change(
        sweeps / "pei_tables_2_3.json", "absolute 1e-3", megasdc__optimizer_hooks=[{"hook": "absolute", "theta": 0.03}]
    )
    change(sweeps / "pei_table_1.json", "checkpoint 2000, LR 5e-3", scheduler__params__warmup_num_steps=84)
    text = render()
    for told in (
        "LR **5e-4→1e-3→2e-3**, beta2 .95",
        "**absolute:1e-3→3.5e-2→3e-2**",
        "**1750/6000→70/240→84/240**",
        "- Size `cpu`: 27 of 42 cells as mapped; not so: `pei_table_1` warm-up/steps in 'checkpoint 2000, LR 5e-3'; "
        "`pei_tables_2_3` bound in 'absolute 1e-3'; `pei_skip_nan` batch in every cell; "
        "`pei_model_size` LR in every cell; ",
    ):
        assert told in text
    assert len(set(figures.fresh(page))) == 2


def test_a_cell_that_the_paper_does_not_have_is_refused(sweeps: Path) -> None:
    """The file, the cell and where its published conditions belong are named."""
    raw = json.loads((sweeps / "pei_skip_nan.json").read_text(encoding="utf-8"))
    raw["cells"].append({"name": "a new one"})
    (sweeps / "pei_skip_nan.json").write_text(json.dumps(raw), encoding="utf-8")
    with pytest.raises(DataError, match=r"pei_skip_nan\.json, size cpu: cell 'a new one' has no published conditions"):
        render()
    with pytest.raises(DataError, match=r"conditions\.sweeps has no ma_nodes; there are pei_table_1"):
        published_cells("ma_nodes")
