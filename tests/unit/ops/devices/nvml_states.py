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
VALUES = {
    **{"lost": 0, "reset_required": 0, "temperature_c": 41, "power_w": 301.5, "clock_reasons": 4},
    **{"power_violation_s": 5.0, "thermal_violation_s": 1.5},
    **{"ecc_corrected_volatile": 3, "ecc_uncorrected_volatile": 0},
    **{"ecc_corrected_aggregate": 40, "ecc_uncorrected_aggregate": 2},
    **{"sram_corrected": 9, "sram_uncorrected": 3, "sram_threshold_exceeded": 0},
    **{"remapped_rows_corrected": 4, "remapped_rows_uncorrected": 1, "remap_pending": 0, "remap_failure": 0},
    **{"pcie_replays": 7, "nvlink_flit_crc_errors": 11, "nvlink_data_crc_errors": 12, "nvlink_replays": 13},
    **{"nvlink_recoveries": 14, "recovery_action": 0},
}
"""What that state reads as, by hand."""


def build(folder: Path, *options: str) -> Path:
    """Build the library; returns its folder."""
    folder.mkdir()
    source, library = HERE / "nvml_library.c", folder / "libnvidia-ml.so.1"
    subprocess.run(
        ["gcc", "-Wall", "-Wno-unused-parameter", "-shared", "-fPIC", *options, "-o", library, source], check=True
    )
    return folder
