"""Conditions of the sweeps after Pei et al.: what the paper says of each cell, what that maps to, and what is run.

Published conditions are those of ``megasdc/lab/sweeps/papers/pei_2025.json``, by sweep and cell; what is run is what
the healthy run of the cell has in the sweep's file. The table stands in the results' page between the marks ``figures
conditions``, and ``python -m tools.bench figures --check`` finds where page and files differ.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megasdc.common.errors import DataError
from megasdc.config.hooks import HookSpec
from megasdc.lab.sweeps.papers.tables import FOLDER
from megasdc.lab.sweeps.plan import build_plan
from megasdc.lab.sweeps.sweep_file import load_sweep
from tools.bench.machine import ROOT

SWEEPS = ROOT / "configs" / "sweeps"
SWEEPS_TOLD = ("pei_table_1", "pei_tables_2_3", "pei_skip_nan", "pei_model_size")
SIZES = ("cpu", "cpu_2x2", "paper")
"""Sweeps and sizes of the page; ``smoke`` shows the machinery alone, and maps nothing."""
PAPER = "pei_2025"
RATE, BOUND = 2, 35
"""Factors of learning rates and of absolute bounds; bounds by the second moment have no unit, and factor 1."""
SAMPLES, TOKENS = 64, 16
"""Divisors of the samples of a batch, and of the tokens of a sample."""
STEPS = 240
"""Steps of every run, also where the paper has 6000; steps within it are in proportion."""
MODELS = {(1024, 24): (64, 4), (2048, 24): (128, 4), (2304, 24): (128, 4), (4096, 24): (160, 4), (6144, 12): (192, 2)}
"""Hidden size and layers of ours for each of the paper's models."""


@dataclass(frozen=True)
class Conditions:
    """Conditions of a cell, the paper's or ours.

    Args:
        lr: highest learning rate.
        beta2: of AdamW.
        batch: samples, and tokens of a sample.
        model: hidden size and layers.
        warm_up: steps of warm-up.
        steps: all steps, those before a checkpoint included.
        start: step of the checkpoint from which the cell starts; None: from scratch.
        bound: rule and theta of the bound on gradients; None: none.
        options: what a bound is told besides; the paper prints nothing of it, so it is not compared.
    """

    lr: float
    beta2: float
    batch: tuple[int, int]
    model: tuple[int, int]
    warm_up: int
    steps: int
    start: int | None
    bound: tuple[str, float] | None
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def words(self) -> dict[str, str]:
        """Texts of a table's cells, without spaces, by column."""
        return {
            "LR": _short(self.lr),
            "beta2": f"{self.beta2:g}"[1:],
            "batch": "x".join(map(str, self.batch)),
            "H x layers": "x".join(map(str, self.model)),
            "warm-up/steps": f"{self.warm_up}/{self.steps}",
            "start": "scratch" if self.start is None else str(self.start),
            "bound": "none" if self.bound is None else f"{self.bound[0]}:{_short(self.bound[1])}",
        }


@dataclass(frozen=True)
class Cell:
    """A cell: published, mapped and run; ``seeds``: number of them."""

    name: str
    published: Conditions
    mapped: Conditions
    run: Conditions
    seeds: int

    @property
    def differing(self) -> tuple[str, ...]:
        """Columns in which the run is not what the published conditions map to."""
        mapped, run = self.mapped.words, self.run.words
        return tuple(name for name in mapped if mapped[name] != run[name])

    @property
    def words(self) -> dict[str, str]:
        """Texts of the table's cells: published, mapped and run; once where equal, bold where the run differs."""
        found = {"seeds": str(self.seeds)}
        published, mapped, run = self.published.words, self.mapped.words, self.run.words
        for name in published:
            texts = [published[name], mapped[name], run[name]]
            if name == "bound" and len({text.partition(":")[0] for text in texts}) == 1:
                texts[1:] = [text.partition(":")[2] for text in texts[1:]]
            text = run[name] if published[name] == mapped[name] == run[name] else "→".join(texts)
            text += self._options if name == "bound" else ""
            found[name] = f"**{text}**" if name in self.differing else text
        return found

    @property
    def _options(self) -> str:
        told = ",".join(
            f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}" for name, value in self.run.options
        )
        return f"({told})" if told else ""


def published_cells(sweep: str) -> dict[str, Conditions]:
    """What the paper says of each cell of a sweep, by the cell's name.

    Raises:
        DataError: nothing is stored of the sweep.
    """
    stored = json.loads((FOLDER / f"{PAPER}.json").read_text(encoding="utf-8"))["conditions"]
    if sweep not in stored["sweeps"]:
        raise DataError(
            f"{FOLDER / PAPER}.json: conditions.sweeps has no {sweep}; there are {', '.join(stored['sweeps'])}"
        )
    every = {**stored["every"], **stored["sweeps"][sweep]["every"]}
    return {name: _read({**every, **cell}) for name, cell in stored["sweeps"][sweep]["cells"].items()}


def _read(said: Mapping[str, Any]) -> Conditions:
    """Conditions with tuples for JSON's lists."""
    lists: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in said.items()}
    return Conditions(**lists)


def mapped(published: Conditions) -> Conditions:
    """What the conditions of the paper map to at the sizes ``cpu`` and ``cpu_2x2``."""
    bound = published.bound
    if bound is not None and bound[0] == "absolute":
        bound = (bound[0], bound[1] * BOUND)
    return Conditions(
        lr=published.lr * RATE,
        beta2=published.beta2,
        batch=(published.batch[0] // SAMPLES, published.batch[1] // TOKENS),
        model=MODELS[published.model],
        warm_up=round(published.warm_up * STEPS / published.steps),
        steps=STEPS,
        start=None if published.start is None else round(published.start * STEPS / published.steps),
        bound=bound,
    )


def cells_of(sweep: str, size: str) -> list[Cell]:
    """Every cell of a sweep's size; the size ``paper`` is mapped to what is published.

    A cell is found by its name, or, where the paper's is named by its hidden size, by ours of the mapped model.

    Raises:
        ConfigError: the sweep's file is wrong.
        DataError: a cell of the file has no published conditions.
    """
    loaded = load_sweep(SWEEPS / f"{sweep}.json", size)
    plan = build_plan(loaded.model_copy(update={"nodes": []}))
    starts = {cell.name: cell.start for cell in plan.cells}
    runs: dict[str, list[Conditions]] = {}
    for place in plan.places:
        start = starts[place.cell]
        step = None if start is None else start.step
        runs.setdefault(place.cell, []).append(_run(plan.runs[place.run_id].config, step))
    found, met = [], set()
    for name, published in published_cells(sweep).items():
        due = published if size == "paper" else mapped(published)
        own = name if name in runs else f"h {due.model[0]}"
        if own in runs:
            met.add(own)
            found.append(Cell(name, published, due, runs[own][0], len(runs[own])))
    if unknown := [name for name in runs if name not in met]:
        raise DataError(
            f"{SWEEPS / sweep}.json, size {size}: cell {unknown[0]!r} has no published conditions; add them to "
            f"conditions.sweeps.{sweep}.cells of {FOLDER / PAPER}.json"
        )
    return found


def _run(config: Mapping[str, Any], start: int | None) -> Conditions:
    """What a run's resolved configuration sets."""
    own = config["megasdc"]
    hooks = own["optimizer_hooks"]
    bound: tuple[str, float] | None = None
    options: tuple[tuple[str, Any], ...] = ()
    if hooks:
        bound = ("+".join(one["hook"] for one in hooks), hooks[0]["theta"])
        usual = {name: field.default for name, field in HookSpec.model_fields.items()}
        others = {name: value for name, value in hooks[0].items() if name not in ("hook", "theta", "parameters")}
        options = tuple((name, value) for name, value in others.items() if value != usual[name] and value != {})
    return Conditions(
        lr=config["optimizer"]["params"]["lr"],
        beta2=config["optimizer"]["params"]["betas"][1],
        batch=(config["train_batch_size"], own["data"]["sequence_length"]),
        model=(own["model"]["hidden_size"], own["model"]["num_layers"]),
        warm_up=config["scheduler"]["params"]["warmup_num_steps"],
        steps=own["training"]["steps"],
        start=start,
        bound=bound,
        options=options,
    )


def _short(number: float) -> str:
    """A number as the paper writes it: 5e-4, 100, 3.5e-2."""
    if number >= 1:
        return f"{number:g}"
    digits, exponent = f"{number:.6e}".split("e")
    return f"{float(digits):g}e{int(exponent)}"


def render() -> str:
    """The tables of all sweeps at size ``cpu`` in markdown, the mapping, and what of other sizes is not as mapped."""
    lines = ["", _mapping(), ""]
    for sweep in SWEEPS_TOLD:
        cells = cells_of(sweep, "cpu")
        scratch = [one for one in cells if one.published.start is None]
        for alike in (scratch, [one for one in cells if one not in scratch]):
            lines += [*_table(sweep, alike), ""] if alike else []
    return "\n".join([*lines, *_differences(), ""])


def _mapping() -> str:
    return (
        f"Mapped at sizes `cpu` and `cpu_2x2`: LR x {RATE}, absolute bounds x {BOUND}, batch / {SAMPLES} and "
        f"/ {TOKENS}, steps in proportion to {STEPS}."
    )


def _table(sweep: str, cells: Sequence[Cell]) -> Iterator[str]:
    """A table with the columns in which cells differ; what all have alike stands above it."""
    words = [cell.words for cell in cells]
    alike = [name for name in words[0] if len({one[name] for one in words}) == 1]
    columns = [name for name in words[0] if name not in alike]
    yield f"`{sweep}`: {', '.join(f'{name} {words[0][name]}' for name in alike)}."
    yield ""
    yield f"| cell | {' | '.join(columns)} |"
    yield f"|{'---|' * (len(columns) + 1)}"
    for cell, one in zip(cells, words, strict=True):
        yield f"| {' | '.join([cell.name, *(one[name] for name in columns)])} |"


def _differences() -> Iterator[str]:
    """A line a size: what is not as mapped, by sweep."""
    for size in SIZES:
        sized = {sweep: cells_of(sweep, size) for sweep in SWEEPS_TOLD if _has(sweep, size)}
        cells = [cell for found in sized.values() for cell in found]
        wrong = sum(bool(cell.differing) for cell in cells)
        told = [f"`{sweep}` {text}" for sweep, found in sized.items() for text in _told(found)]
        mapped_to = "as published" if size == "paper" else "as mapped"
        yield f"- Size `{size}`: {len(cells) - wrong} of {len(cells)} cells {mapped_to}" + (
            f"; not so: {'; '.join(told)}." if told else "."
        )


def _told(cells: Sequence[Cell]) -> Iterator[str]:
    """Differing columns with the cells that have them."""
    for name in cells[0].mapped.words:
        names = [cell.name for cell in cells if name in cell.differing]
        if names:
            yield f"{name} in {'every cell' if len(names) == len(cells) else ', '.join(map(repr, names))}"


def _has(sweep: str, size: str) -> bool:
    return size in json.loads((SWEEPS / f"{sweep}.json").read_text(encoding="utf-8"))["sizes"]
