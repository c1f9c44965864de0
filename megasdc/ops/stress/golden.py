"""Golden values of trusted hardware: checksums of matrix products by device and versions, golden traces of training.

A folder holds ``NAME.gemm.json`` files, which ``megasdc stress --record`` writes, and ``NAME.golden`` files as of
``megasdc golden record``. It is read where the stress test is started; each host is sent the values for its device.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasdc.common.durable import write_durably
from megasdc.common.errors import StorageError, TraceError

FORMAT = "megasdc.stress.gemm.v1"


@dataclass(frozen=True)
class GoldenTraining:
    """A golden trace of the training run, as ``encode`` returns it, its resolved configuration, and its file.

    ``key``: device and versions for which it is valid.
    """

    file: str
    config: dict[str, Any]
    key: dict[str, Any]
    trace: dict[str, Any]


@dataclass(frozen=True)
class GoldenFolder:
    """Contents of a folder of golden files: key and checksums of each file of products; golden traces of one rank."""

    products: tuple[tuple[dict[str, Any], dict[str, int]], ...] = ()
    training: tuple[GoldenTraining, ...] = ()

    def products_for(self, key: Mapping[str, Any]) -> dict[str, int] | None:
        """Checksums for a device of this key, by case; None: none."""
        return next((checksums for own, checksums in self.products if own == key), None)

    def training_for(self, key: Mapping[str, Any]) -> GoldenTraining | None:
        """A golden trace for a device with this key, whatever the checksum algorithm; None: none."""
        named = {name: value for name, value in key.items() if name != "algorithm"}
        return next(
            (one for one in self.training if all(one.key.get(name) == value for name, value in named.items())), None
        )


def load_folder(folder: Path) -> GoldenFolder:
    """Reads all golden files of a folder.

    Raises:
        TraceError: there are none, or one is damaged or of another format.
    """
    products = tuple(load_products(file) for file in sorted(folder.glob("*.gemm.json")))
    files = sorted(folder.glob("*.golden"))
    if not products and not files:
        raise TraceError(
            f"{folder} holds neither *.gemm.json nor *.golden; `megasdc stress --record --golden {folder}` makes them "
            "on a trusted host"
        )
    return GoldenFolder(products, tuple(one for file in files if (one := _load_training(file)) is not None))


def _load_training(file: Path) -> GoldenTraining | None:
    """A golden trace; None if it is of several ranks, since each device is tested alone."""
    from megasdc.ops.stress.drill import ALONE
    from megasdc.ops.stress.training import trace_to_values
    from megasdc.sdc.golden import load_golden

    golden = load_golden(file)
    if golden.layout.layout != ALONE.layout:
        return None
    return GoldenTraining(str(file), golden.config, golden.key, trace_to_values(golden.traces[0, 0]))


def save_products(
    folder: Path, key: Mapping[str, Any], checksums: Mapping[str, int], recorded: Mapping[str, Any]
) -> Path:
    """Writes checksums of products by case; the file is named after the key and replaces one with the same key.

    ``key``: device and versions for which they are valid; ``recorded``: host, time and number of rounds, for display
    only. Raises ``StorageError`` where it cannot be written.
    """
    content: dict[str, Any] = {
        "format": FORMAT,
        "key": dict(key),
        "checksums": {case: f"{value:016x}" for case, value in checksums.items()},
        "recorded": dict(recorded),
    }
    path = folder / f"{_digest(content['key'])[:12]}.gemm.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_durably(path, json.dumps({**content, "sha256": _digest(content)}, indent=1) + "\n")
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}; choose another --golden") from error
    return path


def load_products(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Reads key and checksums of a file that ``save_products`` wrote.

    Raises:
        TraceError: it is damaged, edited or of another format.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        said = content.pop("sha256", None)
        if content.get("format") != FORMAT:
            raise TraceError(f"{path}: the format is {content.get('format')!r}, needed is {FORMAT!r}")
        if said != _digest(content):
            raise TraceError(f"{path} is not what was written; record it again")
        return content["key"], {case: int(value, 16) for case, value in content["checksums"].items()}
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise TraceError(f"{path} is damaged: {error}; copy it again or record it again") from error


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
