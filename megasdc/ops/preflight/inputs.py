"""Checks of what a run is given: configuration, data, hosts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.filesize import decimal

from megasdc.common.errors import DataError
from megasdc.config import check_layout, find_warnings
from megasdc.data.manifest import Manifest
from megasdc.data.verify import check_folder, verify_prepared
from megasdc.ops.launch.checks import inspect_hosts
from megasdc.ops.preflight.job import Job, spares_only
from megasdc.ops.preflight.result import Finding, with_warnings

MOST_BYTES = 64 << 30
"""Of data whose every byte is read; of more what a start reads: a few blocks of the tokens, and all of the rest."""
MIB = 1 << 20


def check_configuration(job: Job) -> Finding:
    """Look for settings that an unattended run hardly wants; it was loaded before."""
    sections, layout = job.config.megasdc, check_layout(job.config, job.num_ranks)
    warnings = find_warnings(job.config)
    if not job.plan.program.watched:
        warnings.append("megasdc.health.enabled: false: a run that is stuck is not ended")
    if not (sections.checkpoint.interval or sections.checkpoint.memory.interval):
        warnings.append("megasdc.checkpoint.interval: 0: a failure loses all that was done")
    if names := [name for name in ("faults", "process_faults", "delay") if getattr(sections, name)]:
        warnings.append(f"megasdc.{names[0]}: the run is disturbed on purpose")
    text = (
        f"{layout.world_size} ranks = tensor {layout.tensor} x pipeline {layout.pipeline} x data {layout.data}, "
        f"{layout.train_batch_size} samples a step"
    )
    return with_warnings(text, warnings)


def check_data(job: Job) -> Finding:
    """Compare data with what was prepared, and count how often the run passes through them.

    Raises:
        DataError: they are damaged, missing, or less than a sample.
    """
    section = job.config.megasdc.data
    folders = [Path(folder) for folder in section.folders]
    manifests = [Manifest.load(folder) for folder in folders]
    size = sum(record.size_bytes for manifest in manifests for record in manifest.files.values())
    is_whole = size <= MOST_BYTES
    if is_whole:
        _read_all(job, folders, size)
    else:
        for folder in folders:
            verify_prepared(folder)
    passes = _passes(job, manifests)
    how = "every byte" if is_whole else "samples of the tokens, all of the rest (megasdc verify-data reads all)"
    text = f"{decimal(size)} unchanged, {how}; {passes:,.2f} passes in {job.config.megasdc.training.steps:,} steps"
    warnings = [f"the data are repeated {passes:,.1f} times"] if passes > 1 else []
    return with_warnings(text, warnings, {"bytes": size, "passes": passes, "every_byte": is_whole})


def _read_all(job: Job, folders: list[Path], size: int) -> None:
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        job.on_progress("data, MiB", done // MIB, -(-size // MIB))

    reports = [check_folder(folder, advance) for folder in folders]
    if problems := [problem for report in reports for problem in report.problems]:
        raise DataError(f"{'; '.join(problems)}; mend them, or prepare them again: `megasdc verify-data FOLDER`")


def _passes(job: Job, manifests: list[Manifest]) -> float:
    """How often the run passes through its training samples, those of a blend that are repeated most."""
    section = job.config.megasdc.data
    needed = check_layout(job.config, job.num_ranks).train_batch_size * job.config.megasdc.training.steps
    needed += sum(end - first for first, end in section.skip)
    weights = [part.weight for part in section.blend] or [1.0]
    found = 0.0
    for folder, manifest, weight in zip(section.folders, manifests, weights, strict=True):
        samples = (manifest.splits["train"].num_tokens - 1) // section.sequence_length
        if samples < 1:
            raise DataError(
                f"{folder} has {manifest.splits['train'].num_tokens:,} tokens to train on, fewer than one sample of "
                f"megasdc.data.sequence_length {section.sequence_length}; prepare more text, or set that lower"
            )
        found = max(found, needed * weight / sum(weights) / samples)
    return found


def check_hosts(job: Job) -> Finding:
    """Ask all hosts, as a launch does; what is wrong with a spare is a warning, since the run can begin.

    Raises:
        LaunchError: the run cannot start on its hosts.
        DataError, StorageError: data differ, or folders of the run cannot be written there, and nothing else is wrong.
    """
    report = inspect_hosts(job.plan.placement, job.plan.transport, job.plan.needs)
    if report.problems:
        raise report.error("; ".join(report.problems))
    where = "this host" if not job.plan.placement.remote else f"{len(job.slots)} hosts"
    versions = next(iter(report.facts.values()))["versions"]
    ranks = f"{job.num_ranks} rank{'s' if job.num_ranks > 1 else ''}"
    text = f"{where}, {ranks}, torch {versions['torch']}, deepspeed {versions['deepspeed']}"
    if not job.spares:
        return with_warnings(text, [])
    plan = spares_only(job.plan, job.spares)
    trusted = job.plan.placement.hosts
    both = replace(plan.placement, slots={**plan.placement.slots, **job.plan.placement.slots})
    found = inspect_hosts(both, plan.transport, plan.needs, trusted=trusted).found
    warnings = [one.text for one in found if not set(one.hosts) <= set(trusted)]
    counts = set(job.slots.values())
    for host, count in job.spares.items():
        if counts != {count}:
            others = ", ".join(map(str, sorted(counts)))
            warnings.append(f"{host} has slots={count}, hosts of the run {others}: with it the layout is another one")
    spares = f"{len(job.spares)} spare{'s' if len(job.spares) > 1 else ''}"
    return with_warnings(f"{text}; {spares}{', not all fit' if warnings else ''}", warnings)
