"""Universal checkpoints: unsharded tensors by name for a run of any layout, and their manifest.

The folder holds what DeepSpeed's ``ds_to_universal`` wrote (``zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt``,
``zero/optimizer_state.pt`` and the files of the stages), the ``megasdc.json`` of the checkpoint that it was made from,
and a manifest of its own, ``universal.json``: it is never taken for a checkpoint of a layout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import model_validator

from megasdc.checkpoint.files import UNIVERSAL_FILE, UNIVERSAL_STEP
from megasdc.checkpoint.formats.records import Count, Record, Time, read_record, write_record
from megasdc.checkpoint.kinds import UNIVERSAL, explain_folder, is_universal
from megasdc.checkpoint.manifest import FileRecord, Layout, check_once
from megasdc.common.errors import CheckpointError

UNIVERSAL_FORMAT_VERSION = 1


class UniversalManifest(Record):
    """Everything known about a universal checkpoint without opening its files.

    Attributes:
        step: optimizer step, first is 1.
        conversion_id: unique to each conversion.
        time: when it was written, in seconds since the epoch.
        source: folder name of the checkpoint that it was made from.
        source_save_id: that checkpoint's ``save_id``.
        source_layout: that checkpoint's layout.
        precision: of the run that saved it.
        engine: see ``Manifest``.
        parameters: unsharded shape by name; all tensors are fp32.
        files: in order of name, without the manifest.
        quantized_moments_bits: see ``Manifest``.
    """

    format_version: int
    state: Literal["complete"]
    step: Count
    conversion_id: str
    time: Time
    source: str
    source_save_id: str
    source_layout: Layout
    precision: Literal["fp32", "bf16", "fp16"]
    engine: dict[str, Any]
    parameters: dict[str, list[Count]]
    versions: dict[str, str]
    files: list[FileRecord]
    quantized_moments_bits: Literal[8] | None = None

    @model_validator(mode="after")
    def _files_are_there_once(self) -> Self:
        check_once(self.files)
        return self

    @property
    def size_bytes(self) -> int:
        """Bytes of all files, without the manifest."""
        return sum(record.size_bytes for record in self.files)


def universal_folder(step: int) -> str:
    """Folder name of a converted checkpoint, such as ``universal_step_00000123``."""
    return f"{UNIVERSAL_STEP}{step:08d}"


def write_universal_manifest(folder: Path, manifest: UniversalManifest) -> None:
    """Write the manifest into its folder.

    Raises:
        OSError: it cannot be written.
    """
    write_record(folder / UNIVERSAL_FILE, manifest)


def read_universal_manifest(folder: Path) -> UniversalManifest:
    """Read and check the manifest of a universal checkpoint; CheckpointError if it is missing or damaged."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; a universal checkpoint is made by megasdc convert-checkpoint")
    if not is_universal(folder):
        raise CheckpointError(
            explain_folder(folder, UNIVERSAL)
            or f"{folder} has no {UNIVERSAL_FILE}: it is no universal checkpoint, or its conversion did not finish; "
            "make one with megasdc convert-checkpoint DIR --to universal"
        )
    return read_record(folder / UNIVERSAL_FILE, UniversalManifest, UNIVERSAL_FORMAT_VERSION)


def find_unknown(folder: Path, manifest: UniversalManifest) -> list[str]:
    """Problems: files that are not in the manifest; DeepSpeed lists folders and opens every file in them."""
    known = {record.name for record in manifest.files} | {UNIVERSAL_FILE}
    found = (path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file())
    return [f"{name} is not in {UNIVERSAL_FILE}: it does not belong here" for name in found if name not in known]
