"""The tests' NVML library: how it is built, and the state of a healthy device."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[3]
HEALTHY: dict[str, Any] = {
    "count": 1,
    "driver": "999.1",
    "0.uuid": "GPU-a",
    "0.temperature": 41,
    "0.power_mw": 301500,
    "0.clock_reasons": "0x4",
    "0.violation.0": 5_000_000_000,
    "0.violation.1": 1_500_000_000,
    "0.ecc.0.0": 3,
    "0.ecc.1.0": 0,
    "0.ecc.0.1": 40,
    "0.ecc.1.1": 2,
    "0.sram.parity": 1,
    "0.sram.sec_ded": 2,
    "0.sram.corrected": 9,
    "0.sram.exceeded": 0,
    "0.remapped.corrected": 4,
    "0.remapped.uncorrected": 1,
    "0.remapped.pending": 0,
    "0.remapped.failed": 0,
    "0.pcie_replays": 7,
    "0.field.38": 11,
    "0.field.45": 12,
    "0.field.52": 13,
    "0.field.59": 14,
    "0.field.230": 0,
}
"""Keys are those of ``nvml_library.c``; volatile and aggregate counters are both there."""


def build(folder: Path, *options: str) -> Path:
    """Build the library; returns its folder."""
    folder.mkdir()
    source, library = HERE / "nvml_library.c", folder / "libnvidia-ml.so.1"
    subprocess.run(
        ["gcc", "-Wall", "-Wno-unused-parameter", "-shared", "-fPIC", *options, "-o", library, source], check=True
    )
    return folder
