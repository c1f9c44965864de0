"""Conversion to a universal checkpoint, which a run of any layout can start from; verified before and after.

The conversion is DeepSpeed's own program ``deepspeed.checkpoint.ds_to_universal`` (0.19), unmodified, in a process
group of its own, which ends with this process. Its output is checked before it gets its final name: exactly the
expected parameters with their states, and every pickle against the allow-list.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from megasdc.checkpoint.allowlist import check_pickle, load_checked
from megasdc.checkpoint.files import (
    CHECKPOINT,
    PARAMETERS_FOLDER,
    SHARED_STATE_FILE,
    STATES,
    UNIVERSAL_OPTIMIZER,
    is_universal,
    kind_of,
    kind_of_file,
)
from megasdc.checkpoint.manifest import (
    UNIVERSAL_FORMAT_VERSION,
    UniversalManifest,
    describe_file,
    installed_versions,
    read_shared_state,
    universal_folder,
    write_universal_manifest,
)
from megasdc.checkpoint.verify import ConvertibleCheckpoint, find_folders, read_source, reading
from megasdc.common.durable import commit_folder, remove_entry, sync_path
from megasdc.common.errors import CheckpointError, StorageError
from megasdc.config.deepspeed import precision_of
from megasdc.model.sharding import UNIVERSAL_INFO_KEY

CONVERTING_PREFIX = ".converting_"
"""Prefix of the temporary folder's name; not that of unfinished saves, which every start of a run removes."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_CHILD = Path(__file__).with_name("conversion_child.py")
_INPUT, _OUTPUT = "source", "universal"
_LOG = "conversion.log"
_TAIL_LINES = 15
_ASKED_BYTES = 8 << 20
_END_S = 2.0
"""Time to wait for killed processes to end; without a process that reaps them they stay in the group."""


@dataclass(frozen=True)
class ConversionReport:
    """Result of a conversion; ``num_parameters``: each unsharded, with its states; ``num_files``: without the manifest.

    ``skipped``: newer checkpoints that were passed over, each with its problems.
    """

    source: str
    path: str
    step: int
    source_layout: str
    num_parameters: int
    num_files: int
    size_bytes: int
    duration_s: float
    skipped: dict[str, list[str]]

    def as_dict(self) -> dict[str, Any]:
        """The report as plain values."""
        return asdict(self)

    def render(self) -> str:
        """The report as text."""
        lines = [f"{name} was skipped: {'; '.join(problems)}" for name, problems in self.skipped.items()]
        lines.append(
            f"{self.source} (step {self.step}, {self.source_layout}) is now {self.path}: {self.num_parameters} "
            f"parameters, {self.num_files} files, {self.size_bytes / 1e6:.1f} MB, {self.duration_s:.1f} s"
        )
        lines.append(f"start a run from it with megasdc.checkpoint.universal={self.path}")
        return "\n".join(lines)


def convert_to_universal(
    path: Path | str,
    out: Path | str | None = None,
    *,
    force: bool = False,
    workers: int | None = None,
    progress: bool = False,
) -> ConversionReport:
    """Convert one checkpoint into a universal one.

    Args:
        path: folder of a checkpoint, or of several: the newest complete one is converted.
        out: folder to write; None: ``universal_step_NNNNNNNN`` beside the checkpoint.
        force: whether an existing universal checkpoint is replaced.
        workers: number of processes that read and write; each holds one optimizer shard. None: one per CPU, at most 4.
        progress: whether progress is drawn on standard error where it is a terminal.

    Raises:
        CheckpointError: the source is damaged or incomplete, was saved without the required information, the conversion
            failed, or the output exists; nothing stays on disk.
        StorageError: the output cannot be written.
    """
    started = time.monotonic()
    source, skipped = _choose(Path(path), progress)
    final = (Path(out) if out is not None else source.path.parent / universal_folder(source.manifest.step)).absolute()
    _check_output(final, source, force)
    with reading(source.path, source.manifest.save_id):
        shared_state = _check_source(source)
    temporary = final.with_name(f"{CONVERTING_PREFIX}{final.name}")
    try:
        with reading(source.path, source.manifest.save_id):
            remove_entry(temporary)
            temporary.mkdir(parents=True)
            _run_deepspeed(source.path.resolve(), temporary, workers or min(4, os.cpu_count() or 1), progress)
            made = temporary / _OUTPUT
            parameters = check_converted(made, _saved_names(source))
            shutil.copyfile(source.path / SHARED_STATE_FILE, made / SHARED_STATE_FILE)
            manifest = _describe(made, source, shared_state, parameters)
            commit_folder(made, final)
    except OSError as error:
        raise StorageError(f"{final} cannot be written: {error}") from error
    finally:
        with contextlib.suppress(NotADirectoryError):  # below a file: nothing was begun
            remove_entry(temporary)
    return ConversionReport(
        source=str(source.path),
        path=str(final),
        step=manifest.step,
        source_layout=str(manifest.source_layout),
        num_parameters=len(parameters),
        num_files=len(manifest.files),
        size_bytes=manifest.size_bytes,
        duration_s=round(time.monotonic() - started, 3),
        skipped=skipped,
    )


def check_converted(folder: Path, names: set[str]) -> dict[str, list[int]]:
    """Check DeepSpeed's output before anything loads it unrestricted; returns the full shape of each parameter.

    ``names``: parameters that the source holds. CheckpointError if a pickle is refused, or a parameter or one of its
    states is missing or unexpected.
    """
    for file in sorted(folder.glob("*.pt")):
        check_pickle(file)
    check_pickle(folder / UNIVERSAL_OPTIMIZER)
    found = {entry.name: entry for entry in sorted((folder / PARAMETERS_FOLDER).iterdir()) if entry.is_dir()}
    if found.keys() != names:
        different = sorted(found.keys() ^ names)
        raise CheckpointError(f"DeepSpeed's conversion dropped or added parameters: {', '.join(different[:5])}")
    shapes = {}
    for name, entry in found.items():
        states = {state: load_checked(entry / f"{state}.pt", mmap=True)["param"] for state in STATES}
        load_checked(entry / "step.pt")
        kinds = {(str(tensor.dtype), tuple(tensor.shape)) for tensor in states.values()}
        if len(kinds) > 1 or "torch.float32" not in {dtype for dtype, _ in kinds}:
            raise CheckpointError(f"DeepSpeed's conversion gave the states of {name} different forms: {sorted(kinds)}")
        shapes[name] = list(states["fp32"].shape)
    return shapes


def _choose(path: Path, progress: bool) -> tuple[ConvertibleCheckpoint, dict[str, list[str]]]:
    """The newest complete checkpoint at a path, and those passed over; CheckpointError if there is none."""
    if is_universal(path):
        raise CheckpointError(f"{path} is a universal checkpoint already: set megasdc.checkpoint.universal to it")
    skipped: dict[str, list[str]] = {}
    for folder in find_folders(path):
        source, problems = read_source(folder, progress=progress)
        if source is not None and not problems:
            return source, skipped
        skipped[folder.name] = problems
    lines = "\n".join(f"  - {name}: {problem}" for name, problems in skipped.items() for problem in problems)
    raise CheckpointError(f"{path} holds no whole checkpoint, nothing was converted:\n{lines}")


def _check_output(final: Path, source: ConvertibleCheckpoint, force: bool) -> None:
    read, written = source.path.resolve(), final.resolve()
    if read.is_relative_to(written):
        raise CheckpointError(f"{final} cannot be the output: it is or holds the checkpoint that is converted")
    if inside := next((one for one in written.parents if kind_of(one) == CHECKPOINT), None):
        raise CheckpointError(f"{final} cannot be the output: it lies in the checkpoint {inside}")
    if final.exists() and not final.is_dir():
        raise CheckpointError(f"{final} is a file; choose another --out")
    if not final.exists() or (final.is_dir() and not any(final.iterdir())):
        return
    if not force:
        raise CheckpointError(f"{final} exists; choose another --out, or replace it with --force")
    if not is_universal(final):
        raise CheckpointError(f"{final} is no universal checkpoint, --force does not replace it; choose another --out")


def _check_source(source: ConvertibleCheckpoint) -> dict[str, Any]:
    """Load the shared state that megasdc saved; CheckpointError if what the conversion needs was not saved."""
    if UNIVERSAL_INFO_KEY not in load_checked(source.path / _stages(source)[0], mmap=True):
        raise CheckpointError(
            f"{source.path} was saved without {UNIVERSAL_INFO_KEY}, by an older megasdc: how its tensors were divided "
            "is not known. Resume from it at its own layout, save again, and convert that checkpoint"
        )
    return read_shared_state(source.path)


def _stages(source: ConvertibleCheckpoint) -> list[str]:
    return sorted(name for name in source.records if kind_of_file(name) == "stages")


def _saved_names(source: ConvertibleCheckpoint) -> set[str]:
    """Names of all parameters, from the files of all stages."""
    states = (load_checked(source.path / name, mmap=True) for name in _stages(source))
    return {name for state in states for group in state["param_shapes"] for name in group}


def _run_deepspeed(source: Path, temporary: Path, workers: int, progress: bool) -> None:
    """Run DeepSpeed's program; CheckpointError with the end of its output if it failed, OSError if the disk is full.

    Paths are short, relative and plain, because it builds glob patterns from them: in a path with brackets it would
    find no file. The source gets a plain name through a link.
    """
    (temporary / _INPUT).symlink_to(source)
    command = [sys.executable, "-P", str(_CHILD), "--input_folder", _INPUT, "--output_folder", _OUTPUT]
    command += ["--num_extract_workers", str(workers), "--num_merge_workers", str(max(1, workers // 2))]
    log = temporary / _LOG
    # A stop signal that ended this before `process` has a value would leave it behind.
    with _noted_signals() as pass_on, open(log, "wb") as output:
        process = subprocess.Popen(
            command,
            cwd=temporary,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        try:
            pass_on()
            with _spinner() if progress else nullcontext() as show:
                while process.poll() is None:
                    if show is not None:
                        show(_tail(log, 1))
                    time.sleep(0.1)
        finally:
            _end_group(process)
    if process.returncode != 0:
        _check_room(temporary, max(entry.stat().st_size for entry in source.iterdir()))
        raise CheckpointError(
            f"DeepSpeed's conversion of {source} failed with exit code {process.returncode}:\n{_tail(log, _TAIL_LINES)}"
        )


@contextmanager
def _noted_signals() -> Iterator[Callable[[], None]]:
    """Only note stop signals that have a handler, until the function that this yields gives them to it.

    They are not blocked: another thread of this process would get what one of them blocks. Handlers are called in the
    main thread alone, so that in another one there is nothing to do.
    """
    noted: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS if is_main}
    before = {number: handler for number, handler in before.items() if callable(handler)}
    for number in before:
        signal.signal(number, lambda number, frame: noted.append(number))

    def pass_on() -> None:
        while before:
            signal.signal(*before.popitem())
        while noted:
            signal.raise_signal(noted.pop(0))

    try:
        yield pass_on
    finally:
        pass_on()


def _check_room(folder: Path, size: int) -> None:
    """Raise an OSError if a file of ``size`` bytes does not fit; torch does not say why a write failed.

    A few megabytes are really allocated, because a quota may refuse them.
    """
    if shutil.disk_usage(folder).free < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, min(size, _ASKED_BYTES))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the rest of the conversion, DeepSpeed's workers too, so that nothing writes any more."""
    deadline = time.monotonic() + _END_S
    with contextlib.suppress(ProcessLookupError):  # the group has ended
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        while time.monotonic() < deadline:
            os.killpg(process.pid, 0)
            time.sleep(0.02)
    assert process.stdin is not None, "it is a pipe"
    process.stdin.close()


def _tail(log: Path, count: int) -> str:
    """The last lines of a log; a progress bar's carriage returns end lines too."""
    text = log.read_bytes()[-20_000:].decode(errors="replace")
    lines = [line for line in re.split(r"[\r\n]+", text) if line.strip()]
    return "\n".join(lines[-count:])


@contextmanager
def _spinner() -> Iterator[Any]:
    """Show a spinner with the last line of the log."""
    with Console(stderr=True).status("starting DeepSpeed's conversion") as status:
        yield lambda line: status.update(f"converting: {line.strip()[:100]}" if line else "converting")


def _describe(
    folder: Path, source: ConvertibleCheckpoint, shared_state: dict[str, Any], parameters: dict[str, list[int]]
) -> UniversalManifest:
    """Wait until all files are on the disk, and write the manifest."""
    node, files = socket.gethostname(), []
    for file in sorted(entry for entry in folder.rglob("*") if entry.is_file()):
        sync_path(file)
        files.append(describe_file(folder, file.relative_to(folder).as_posix(), rank=0, node=node))
    for entry in [*(path for path in folder.rglob("*") if path.is_dir()), folder]:
        sync_path(entry)
    saved = source.manifest
    manifest = UniversalManifest(
        format_version=UNIVERSAL_FORMAT_VERSION,
        state="complete",
        step=saved.step,
        conversion_id=uuid.uuid4().hex,
        time=time.time(),
        source=source.path.name,
        source_save_id=saved.save_id,
        source_layout=saved.layout,
        precision=precision_of(shared_state.get("config", {})),
        engine=saved.engine,
        parameters=parameters,
        versions=installed_versions(),
        files=files,
        quantized_moments_bits=saved.quantized_moments_bits,
    )
    write_universal_manifest(folder, manifest)
    return manifest
