"""Does every value that a configuration may have, in every field, train or end with a documented exit code?

All of them, a line each as soon as it has ended, take half an hour on two cores:

    pytest -s -m full tests/distributed/test_every_field_trains.py

``MEGASDC_VALUES`` selects by number as Python slices do: ``700:`` goes on where a run was ended, ``1::4`` is a quarter.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from field_values import context_of, fields, put, value_at, values_of
from harness import run_distributed
from whole_runs import prepare_text, pretrain_within

from megasdc.common.errors import ERRORS_BY_EXIT_CODE, ConfigError
from megasdc.config.load import parse_config

pytestmark = pytest.mark.distributed

Path_ = tuple[str | int, ...]
Trial = tuple[int, Path_, Any]
"""Number, field and value."""
DOCUMENTED = {0, *ERRORS_BY_EXIT_CODE}
WORKERS = 2
TWO_RANKS = (
    "megasdc.parallel",
    "megasdc.audit",
    "megasdc.study",
    "zero_optimization",
    "communication_data",
    "prescale",
    "gradient_predivide",
    "disable_allgather",
    "bf16",
    "data_types",
    "gradient_clipping",
)
"""Fields that one rank alone does not read."""
NOT_TRAINED_WITH = ("megasdc.data.sources", "megasdc.golden", "comet", "wandb", "aio", "megasdc.data.tokenizer")
"""Fields that no training rank reads, or checks and nothing more; one value of each is trained with."""
AS_ASKED = (
    "train_batch_size",
    "gradient_accumulation_steps",
    "eval_samples",
    "mean_s",
    "std_s",
    "delay_s",
    "micro_batch_latency_s",
)
"""Fields whose large values are work or waiting without end, as the user asks; so are the next ones."""
ENDS_RANKS = ("megasdc.process_faults.0.steps", "megasdc.process_faults.1.factor", "megasdc.process_faults.1.kind")
"""Fields with which a rank is ended or stopped on purpose."""
LONG_WORK = (10_000, 100_000, 2**31)
"""Sizes that fit and take long."""
MOST_ALIKE = 2
MOST_MEMORY = 4 << 30
"""Bytes that a rank can have, so that a value that asks for more ends its rank and not the machine."""
MOST_TIME_S = 150.0


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared text."""
    return prepare_text(tmp_path_factory.mktemp("text"))


def accepted_values() -> Iterator[tuple[Path_, Any]]:
    """Every field with values that the checks let through; of many alike the smallest, the largest, some between."""
    for path, annotation in fields():
        base, found = context_of(path), {}
        name = ".".join(map(str, path))
        if name.startswith(ENDS_RANKS):
            continue
        for value in values_of(annotation):
            raw = copy.deepcopy(base)
            put(raw, path, value)
            if value in LONG_WORK or (path[-1] in AS_ASKED and type(value) in (int, float)):
                continue
            try:
                parse_config(raw)
            except ConfigError:
                continue
            found.setdefault(json.dumps(value), value)
        numbers = sorted(value for value in found.values() if type(value) in (int, float))
        others = [value for value in found.values() if type(value) not in (int, float)]
        most = 1 if name.startswith(NOT_TRAINED_WITH) else MOST_ALIKE
        yield from ((path, value) for value in (*_spread(numbers, most), *_spread(others, 2 * most)))


def _spread(values: list[Any], most: int) -> list[Any]:
    """At most so many, evenly chosen, with the first and the last."""
    if len(values) <= most:
        return values
    return [values[round(i * (len(values) - 1) / max(1, most - 1))] for i in range(most)]


def train_with(path: Path_, value: Any, data: Path, folder: Path) -> tuple[Any, str]:
    """Train two steps with one value; the first exit code that is not 0, and its message."""
    raw = context_of(path)
    name = ".".join(map(str, path))
    folder.mkdir(parents=True)
    put(raw, ("megasdc", "data", "path"), str(data))
    put(raw, ("megasdc", "logging", "run_dir"), str(folder / "run"))
    for key in ("tensorboard", "csv_monitor"):
        if key in raw:
            raw[key]["output_path"] = str(folder / key)
    if "blend" in raw["megasdc"]["data"]:
        put(raw, ("megasdc", "data", "blend", 0, "path"), str(data))
    put(raw, path, value)
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    world = 2 if name.startswith(TWO_RANKS) else 1
    for key in ("replicas", "tensor", "pipeline"):
        world = max(world, int(value_at(raw, ("megasdc", "study" if key == "replicas" else "parallel", key)) or 1))
    most = MOST_MEMORY * (4 if path[-1] == "threads" else 1)  # their stacks are counted, used or not
    ranks = (pretrain_within, min(world, 4), str(folder / "config.json"), [], most)
    try:
        results = run_distributed(*ranks, init=False, timeout_s=MOST_TIME_S)
    except AssertionError as error:
        return "died", str(error)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    undocumented = [result for result in results if result[0] not in DOCUMENTED]
    return next(iter([*undocumented, *(result for result in results if result[0])]), (0, ""))


def train_all(trials: list[Trial], data: Path, folder: Path) -> Iterator[tuple[Path_, Any, Any, str]]:
    """Train with each value, a few at a time; a line of each that has ended goes to standard output."""

    def train(number: int, path: Path_, value: Any) -> tuple[Any, str]:
        start = time.monotonic()
        code, message = train_with(path, value, data, folder / str(number))
        said = message if code not in DOCUMENTED else "".join(message.splitlines()[1:2] or message.splitlines()[:1])
        ended = f"{code} after {time.monotonic() - start:.1f} s"
        print(f"{number} {'.'.join(map(str, path))} = {value!r:.60}: {ended} {said}", flush=True)
        return code, message

    with ThreadPoolExecutor(WORKERS) as pool:
        jobs = [pool.submit(train, *trial) for trial in trials]
        for (_, path, value), job in zip(trials, jobs, strict=True):
            yield path, value, *job.result()


KNOWN: list[tuple[Path_, Any, int, str]] = [
    (("csv_monitor", "output_path"), "/proc/x/y", 77, "csv_monitor.output_path: /proc/x/y/.* is not writable"),
    (
        ("megasdc", "logging", "run_dir"),
        "x" * 300,
        77,
        "megasdc.logging.run_dir: x+ is not writable .File name too long",
    ),
    (("megasdc", "model", "initial_weights"), "x" * 300, 77, "initial_weights: x+ cannot be read .File name too l"),
    (("megasdc", "optimizer_hooks", 1, "floor"), 1e308, 0, ""),
    (("megasdc", "model", "megatron", "glu_linear_offset"), -(10**30), 0, ""),
    (
        ("zero_optimization", "reduce_bucket_size"),
        2**53,
        70,
        "this rank could not get the memory it asked for: .*36028797018963968 bytes",
    ),
    (
        ("megasdc", "model", "ffn_hidden_size"),
        2**53,
        70,
        "a rank .* needs at least .* GiB .* has .* GiB",
    ),
]


def test_values_that_ended_with_a_traceback(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that cannot be and a model that cannot fit end a rank with the documented code and the field."""
    monkeypatch.chdir(tmp_path)
    trials = [(number, path, value) for number, (path, value, _, _) in enumerate(KNOWN)]
    for (_, _, code, message), found in zip(KNOWN, train_all(trials, data, tmp_path), strict=True):
        assert found[2] == code, found
        assert re.search(message, found[3], re.DOTALL), found


@pytest.mark.full
def test_every_accepted_value_ends_with_a_documented_code(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a field may be, two steps with it end with 0 or a code of the table, never with a traceback."""
    monkeypatch.chdir(tmp_path)
    part = slice(*(int(end) if end else None for end in os.environ.get("MEGASDC_VALUES", ":").split(":")))
    trials = [(number, *trial) for number, trial in enumerate(accepted_values())][part]
    wrong = [found for found in train_all(trials, data, tmp_path / "runs") if found[2] not in DOCUMENTED]
    assert not wrong, f"{len(wrong)} of {len(trials)}: " + "\n".join(map(str, wrong))
