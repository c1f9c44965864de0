"""What a rank needs of its host before it can train, checked there without one; no torch.

It is a ``HostModule`` (``megasdc.ops.launch.remote``): the request has the fields of ``HostRequest``, the answer is a
list of ``UnfitHost``, what the host lacks, empty where it is fit; meanwhile comes how far it is where every byte of the
data is read. What a launch asks of every host (``megasdc.ops.launch.checks``) is not asked again.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from megasdc.checkpoint.host_memory import memory_folder
from megasdc.common.durable import probe
from megasdc.common.errors import ConfigError, DataError, LaunchError, MegasdcError, StorageError
from megasdc.common.host import SNAPSHOT_SHARE, free_memory, shared_folder
from megasdc.common.program import report_bytes
from megasdc.config.checks import BatchLayout, check_layout
from megasdc.config.load import RunConfig, load_config
from megasdc.data.manifest import DataManifest, check_folder, verify_prepared
from megasdc.ops.launch.host_process import read_request, send_to_caller
from megasdc.ops.supervise.diagnosis import UnfitHost
from megasdc.train.memory import check_memory, host_memory_bytes, memory_of_stages

MODULE = "megasdc.ops.supervise.host_check"
WHOLE_BYTES = 64 << 30
"""Of data whose every byte is read where that is asked for; of more what a start reads."""
GIB = 1 << 30
Progress = Callable[[str], None]
TELL_S = 1.0
_CAUTION = 0.5
"""Of what a checkpoint is predicted to take: less room than that is too little for certain."""


@dataclass(frozen=True)
class HostRequest:
    """What is asked of a host.

    Args:
        config: the run's JSON file; None: the training is not megasdc's own.
        overrides: as of ``--set``.
        allow_changed: as of ``--allow-changed``.
        ranks: of the run.
        slots: ranks on this host.
        hosts: of the run.
        run: its id; None: it was never started.
        snapshot_bytes: that snapshots in memory of a rank take, as a start has measured; None: none has.
        whole: read every byte of the data.
        script: of a training that is not megasdc's own; None: it is.
        is_module: it is the name of a module, not a path.
        modules: that it needs, see ``modules_of``.
    """

    config: str | None
    overrides: list[str]
    allow_changed: list[str]
    ranks: int
    slots: int
    hosts: int
    run: str | None
    snapshot_bytes: int | None
    whole: bool
    script: str | None = None
    is_module: bool = False
    modules: list[str] = field(default_factory=list)


def check_host(request: HostRequest, progress: Progress = lambda text: None) -> list[UnfitHost]:
    """What this host lacks, without its name; the data first, whose vocabulary the others need.

    Args:
        progress: receives how far it is, where every byte of the data is read.
    """
    if request.config is None:
        return [*_lacks(lambda: _check_imports(request)), *_lacks(_check_shared_memory)]
    try:
        config = load_config(request.config, request.overrides, request.allow_changed)
        layout = check_layout(config, request.ranks)
    except ConfigError as error:
        return [UnfitHost("", error.exit_code, str(error))]
    found = list(_lacks(lambda: _check_data(config, request.whole, progress)))
    vocab_size = config.megasdc.data.tokenizer.vocab_size
    with suppress(DataError):  # it is among those found
        vocab_size = DataManifest.load(config.megasdc.data.folders[0]).tokenizer.vocab_size
    stages = memory_of_stages(config, vocab_size, 1, 1)
    size = config.megasdc.parallel.tensor * sum(stage.weights + stage.state for stage in stages)
    found += _lacks(lambda: _check_memory(config, layout, vocab_size, request.slots))
    found += _lacks(lambda: _check_disk(config, _CAUTION * size, request.hosts))
    memory = config.megasdc.checkpoint.memory
    if memory.interval and memory.without_room == "refuse":
        least = request.snapshot_bytes or _CAUTION * size / request.ranks
        found += _lacks(lambda: _check_snapshots(request, round(request.slots * least)), snapshots=True)
    return found


def _lacks(check: Callable[[], None], *, snapshots: bool = False) -> Iterator[UnfitHost]:
    try:
        check()
    except MegasdcError as error:
        yield UnfitHost("", error.exit_code, str(error), snapshots)


def modules_of(script: str, is_module: bool, folders: Sequence[str]) -> list[str]:
    """Modules that a training that is not megasdc's own needs on each host, by their first names.

    It is itself, or imports them whatever happens: not within a condition or a function. Only what is found here is
    needed elsewhere: the rest comes by a path that the script, or the environment of its ranks alone, adds.

    Args:
        folders: that a rank looks in first, beside that of a script.
    """
    if is_module:
        names = [script.partition(".")[0]]
    else:
        names, folders = [], [*_folder_of(script), *folders]
        with suppress(OSError, SyntaxError, ValueError, RecursionError):  # a launch checks that it can be read
            names = _imported(ast.parse(Path(script).read_bytes()))
    missing = _missing(names, folders)
    return [name for name in names if name not in missing]


def _check_imports(request: HostRequest) -> None:
    """Raise LaunchError where a module is not installed that a training that is not megasdc's own needs."""
    assert request.script is not None, "of a training that is not megasdc's own"
    if missing := _missing(request.modules, [] if request.is_module else _folder_of(request.script)):
        raise LaunchError(
            f"{request.script} needs {', '.join(missing)}, not installed in {sys.prefix}; install what other hosts have"
        )


def _folder_of(script: str) -> list[str]:
    return [str(Path(script).absolute().parent)]


def _missing(names: Sequence[str], folders: Sequence[str]) -> list[str]:
    """Those of modules that are not found, in folders first."""
    before = list(sys.path)
    sys.path[:0] = folders
    importlib.invalidate_caches()
    try:
        return [name for name in names if not _is_found(name)]
    finally:
        sys.path[:] = before


def _is_found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # it is loaded, and from no file, as __main__ may be
        return True


def _imported(tree: ast.Module) -> list[str]:
    """First parts of the names of modules that are imported whatever happens."""
    names = [one.name for part in tree.body if isinstance(part, ast.Import) for one in part.names]
    names += [part.module for part in tree.body if isinstance(part, ast.ImportFrom) and part.module and not part.level]
    return list(dict.fromkeys(name.partition(".")[0] for name in names))


def _check_shared_memory() -> None:
    """Raise StorageError where nothing can be written to the folder of shared memory, as ranks and libraries do."""
    try:
        probe(shared_folder())
    except OSError as error:
        raise StorageError(f"{shared_folder()} cannot be written to: {error.strerror}; free space there") from error


def _check_data(config: RunConfig, whole: bool, progress: Progress) -> None:
    """Raise DataError where prepared data are damaged or missing."""
    folders = [Path(folder) for folder in config.megasdc.data.folders]
    manifests = [DataManifest.load(folder) for folder in folders]
    size = sum(record.size_bytes for manifest in manifests for record in manifest.files.values())
    advance = report_bytes(progress, size, TELL_S)
    for folder in folders:
        if not whole or size > WHOLE_BYTES:
            verify_prepared(folder)
        elif problems := check_folder(folder, advance).problems:
            raise DataError("; ".join(problems))


def _check_memory(config: RunConfig, layout: BatchLayout, vocab_size: int, slots: int) -> None:
    """Raise ConfigError where ranks get too little memory, in all or of what is free; not for accelerators'."""
    if os.environ.get("DS_ACCELERATOR") != "cpu" and any(Path("/dev").glob("nvidia[0-9]*")):
        return
    stages = memory_of_stages(config, vocab_size, layout.data, layout.micro_batch_size)
    least = min(stages, key=lambda stage: stage.on_device + stage.state)
    check_memory(config, [least], 0, slots, host_memory_bytes(), None)
    needed, free = slots * (least.on_device + least.state), free_memory()
    if needed > free:
        raise ConfigError(
            f"megasdc.model: {slots} ranks need {needed / GIB:,.2f} GiB of memory at least, and {free / GIB:,.2f} GiB "
            "are free: end what else runs there"
        )


def _check_disk(config: RunConfig, least: float, hosts: int) -> None:
    """Raise StorageError where a checkpoint has no room.

    Args:
        least: bytes of a whole checkpoint; with node-local storage each host has its part.
    """
    sections = config.megasdc
    section, run_dir = sections.checkpoint, sections.logging.run_dir
    path = folder = Path(section.folder or f"{run_dir}/checkpoints").absolute()
    while not path.exists():
        path = path.parent
    needed = least / hosts if section.storage == "node_local" else least
    free = shutil.disk_usage(path).free
    if needed > free:
        raise StorageError(
            f"{folder}: {free / GIB:,.3f} GiB are free, and a checkpoint takes more than {needed / GIB:,.3f} GiB: free "
            "space"
        )


def _check_snapshots(request: HostRequest, needed: int) -> None:
    """Raise ConfigError where snapshots in memory have no room, as a rank does after its first step."""
    folder = shared_folder()
    if request.run is not None:
        needed -= sum(path.stat().st_size for path in memory_folder(request.run).glob("**/*.pt"))
    free = min(free_memory(), shutil.disk_usage(folder).free)
    if needed > SNAPSHOT_SHARE * free:
        raise ConfigError(
            f"megasdc.checkpoint.memory.interval: snapshots need {needed / GIB:,.3f} GiB of memory, and of the "
            f"{free / GIB:,.3f} GiB that are free in {folder} they may take {SNAPSHOT_SHARE:.0%}: free space there"
        )


def main() -> int:
    """Check as the caller asks; returns 0."""
    request = HostRequest(**read_request())
    found = check_host(request, lambda text: send_to_caller({"progress": text}))
    send_to_caller({"answer": [asdict(one) for one in found]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
