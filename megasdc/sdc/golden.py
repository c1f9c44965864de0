"""Golden traces: what trusted hardware computed for a seeded workload, and verdicts on ranks compared with it.

The file holds checksums, one trace for each case and rank, and the key of the environments that they hold for. It is a
zip archive whose header has the SHA-256 of every member and of itself: a truncated or edited one is refused. Versions,
device and variables that choose kernels are the machine's part of the key.

Verdicts follow from the findings of all ranks of a cell. A rank is named only where no other can have caused its first
difference. How ranks mix in a step: tensor ranks and stages of a replica exchange results that are observed before they
are sent; then come, each observed after it only, the sums of gradients over tied stages and tensor ranks
(``accumulated_grad``), the sum over replicas (``reduced_grad``), the norm of the whole gradient (``update``), and the
all-gather over replicas (``parameter``).

The ranks of a training are compared while it runs, by whatever they compute for it (``compare_ranks``,
``GoldenAnswer``).
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import tempfile
import time
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from megasdc import __version__
from megasdc.common.addresses import ACCUMULATED_GRAD, PARAMETER, PHASES, RECOMPUTE, REPLICA_PHASES, UPDATE, Address
from megasdc.common.errors import StorageError, TraceError
from megasdc.common.program import write_atomically
from megasdc.config.environment import CPU_KERNEL_VARIABLES, VARIABLES
from megasdc.config.sections import TraceSection
from megasdc.parallel.collectives import gather_objects
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.finding import Finding
from megasdc.sdc.host import Host, on_all_ranks
from megasdc.sdc.trace import Counts, Trace, TraceWriter, compare_rank, execution_key, read_trace
from megasdc.sdc.verdict import GOLDEN, INCONCLUSIVE, INTERMITTENT, NOT_REPRODUCED, PERSISTENT, RankVerdict, rate_bound
from megasdc.tensors.checksum import ALGORITHMS

_HEADER = "header.json"
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, KeyError, ValueError, OSError, RecursionError)
"""Exceptions that reading a damaged zip file may raise."""


def write_sealed(path: Path, header: Mapping[str, Any], members: Mapping[str, bytes]) -> None:
    """Write an archive atomically; its folder is created if absent.

    Args:
        path: replaced if it exists; of a link the target is replaced; a device or pipe is written to.
        header: plain values, among them ``format`` and the checksum ``algorithm`` of the traces.
        members: contents by name.

    Raises:
        OSError: it cannot be written.
    """
    sealed: dict[str, Any] = {**header, "sha256": {}}
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_STORED) as archive:
        for name, data in members.items():
            sealed["sha256"][name] = hashlib.sha256(data).hexdigest()
            archive.writestr(name, data)
        sealed["digest"] = header_digest(sealed)
        archive.writestr(_HEADER, json.dumps(sealed, indent=1))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content.getvalue())


def read_sealed_header(path: Path, wanted: Sequence[str], remedy: str) -> dict[str, Any]:
    """Read the header of an archive and check its digest.

    Args:
        wanted: formats that it may have.
        remedy: advice how to make the file, for the message where it is missing.

    Raises:
        TraceError: the file is missing, truncated, edited or of another format, or names an unknown algorithm.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            header = json.loads(_stored(archive, _HEADER))
        if header.get("format") not in wanted:
            raise TraceError(f"{path}: the format is {header.get('format')!r}, needed is {' or '.join(wanted)}")
        if header.pop("digest", None) != header_digest(header):
            raise TraceError(f"{path}: the header is not the one that was written; record the golden trace again")
    except FileNotFoundError as error:
        raise TraceError(f"{path} does not exist; {remedy}") from error
    except (*_DAMAGED, AttributeError) as error:
        raise TraceError(f"{path} is damaged or not a golden trace: {error}; copy or record it again") from error
    if header["algorithm"] not in ALGORITHMS:
        raise TraceError(
            f"{path}: checksum algorithm {header['algorithm']!r} is unknown here; known are {', '.join(ALGORITHMS)}"
        )
    found: dict[str, Any] = header
    return found


def read_members(path: Path, header: Mapping[str, Any], names: Iterable[str]) -> dict[str, bytes]:
    """Read some members, and check the digest of each.

    Raises:
        TraceError: the file is truncated or edited.
    """
    found = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for name in names:
                data = _stored(archive, name)
                if hashlib.sha256(data).hexdigest() != header["sha256"].get(name):
                    raise TraceError(f"{path}: {name} is not the trace that was written")
                found[name] = data
    except _DAMAGED as error:
        raise TraceError(f"{path} is damaged: {error}; copy or record it again") from error
    return found


def _stored(archive: zipfile.ZipFile, name: str) -> bytes:
    """Content of a member; ValueError for a compressed one, which was not written so and could fill the memory."""
    member = archive.getinfo(name)
    if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
        raise ValueError(f"{name} is compressed")
    return archive.read(member)


def trace_to_bytes(trace: Trace) -> bytes:
    """A trace as the content of a trace file."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "trace"
        writer = TraceWriter(file, {})
        writer.append(trace)
        writer.close()
        return file.read_bytes()


def trace_from_bytes(data: bytes) -> Trace:
    """A trace from the content of a trace file.

    Raises:
        TraceError: it is not one, or the folder of temporary files cannot be written.
    """
    try:
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / "trace"
            file.write_bytes(data)
            return read_trace(file)[1]
    except OSError as error:
        raise TraceError(
            f"{tempfile.gettempdir()} cannot be written, which reading a golden trace needs: {error}"
        ) from error


def header_digest(header: Mapping[str, Any]) -> str:
    """SHA-256 of a header, and so of the whole file, since the header holds the digests of all members."""
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()


FORMAT = "megasdc.golden.v1"


@dataclass(frozen=True)
class Case:
    """One set of inputs of the workload.

    Args:
        sequence_length: tokens s of a sample.
    """

    seed: int
    sequence_length: int


@dataclass(frozen=True)
class Golden:
    """The contents of a golden file.

    Args:
        key: properties, by name, that must be equal for results to be comparable.
        layout: sizes of the parallel dimensions; every rank has a trace in each case.
        repeats: number of times that the workload was repeated, with equal results, when it was recorded.
        recorded: time and place of the recording, for people.
        traces: by (case, rank).
    """

    key: dict[str, Any]
    config: dict[str, Any]
    layout: ParallelDims
    algorithm: str
    cases: tuple[Case, ...]
    repeats: int
    recorded: dict[str, Any]
    traces: Mapping[tuple[int, int], Trace]


def key_differences(expected: Mapping[str, Any], got: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Differing parts of two keys, as (expected, got); a missing part is None."""
    names = sorted(set(expected) | set(got))
    return {name: (expected.get(name), got.get(name)) for name in names if expected.get(name) != got.get(name)}


def describe_differences(differences: Mapping[str, Sequence[Any]], most: int | None = None) -> str:
    """Differing parts of a golden trace's key and of one here, as text, in their order.

    Args:
        most: number of parts that are named; the others are counted. None: all are named.
    """
    parts = [f"{name}: golden {expected!r}, here {got!r}" for name, (expected, got) in differences.items()]
    more = "" if most is None or len(parts) <= most else f"; and {len(parts) - most} more"
    return "; ".join(parts[:most]) + more


def save_golden(path: Path, golden: Golden) -> None:
    """Write a golden file atomically.

    Args:
        path: replaced if it exists; of a link the target is replaced; a device or pipe is written to.

    Raises:
        StorageError: it cannot be written.
    """
    header: dict[str, Any] = {
        "format": FORMAT,
        "key": golden.key,
        "config": golden.config,
        "layout": golden.layout.layout,
        "algorithm": golden.algorithm,
        "cases": [asdict(case) for case in golden.cases],
        "repeats": golden.repeats,
        "recorded": golden.recorded,
    }
    try:
        traces = sorted(golden.traces.items())
        write_sealed(path, header, {_member(*place): trace_to_bytes(trace) for place, trace in traces})
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}; choose another --out") from error


def load_header(path: Path) -> dict[str, Any]:
    """Read the header of a golden file and check its digest.

    Raises:
        TraceError: the file is missing, truncated, edited or of another format.
    """
    return read_sealed_header(path, (FORMAT,), f"`megasdc golden record --config F --out {path}` makes it")


def load_golden(path: Path, rank: int | None = None) -> Golden:
    """Read a golden file and check the digest of every trace that is read.

    Args:
        rank: only the traces of this rank; None: of all.

    Raises:
        TraceError: the file is missing, truncated, edited, of another format, or names an unknown algorithm.
    """
    header = load_header(path)
    layout = ParallelDims(**header["layout"])
    cases = tuple(Case(**case) for case in header["cases"])
    ranks = range(layout.world_size) if rank is None else [rank]
    places = {_member(case, one): (case, one) for case in range(len(cases)) for one in ranks}
    found = read_members(path, header, places)
    return Golden(
        header["key"],
        header["config"],
        layout,
        header["algorithm"],
        cases,
        header["repeats"],
        header["recorded"],
        {place: trace_from_bytes(found[name]) for name, place in places.items()},
    )


def _member(case: int, rank: int) -> str:
    return f"case_{case:03d}/rank_{rank:05d}.arrow"


CPUINFO = Path("/proc/cpuinfo")
PROCESSOR_FIELDS = (
    *("model name", "cpu family", "model", "stepping"),
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision"),
)
"""Fields that identify a processor: on x86 the name alone does not, and on Arm there is none."""


def machine_key() -> dict[str, Any]:
    """The part of a key that needs no workload: versions, device, and environment variables that choose kernels.

    Without a GPU, too, the number of ``threads`` in force. A deterministic-mode variable that is not set counts as its
    deterministic value, so that, but for ``threads``, the key is the same in a rank and in the process that starts it.
    """
    return {
        "megasdc": __version__,
        **{name: metadata.version(name) for name in ("torch", "deepspeed", "megatron-core")},
        "torch_build": torch.version.git_version,
        **(_gpu() if torch.cuda.is_available() else _cpu()),
    }


def _gpu() -> dict[str, Any]:
    major, minor = torch.cuda.get_device_capability()
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {
        "device": torch.cuda.get_device_name(),
        "capability": f"{major}.{minor}",
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": nccl,
        **{one.name: (os.environ.get(one.name) or one.value).lower() for one in VARIABLES},
    }


def _cpu() -> dict[str, Any]:
    chosen = (*CPU_KERNEL_VARIABLES, "OMP_DYNAMIC")
    return {
        "device": processor_name(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        **{name: os.environ[name].lower() for name in chosen if os.environ.get(name)},
        "threads": torch.get_num_threads(),
    }


def processor_name(cpuinfo: Path = CPUINFO) -> str:
    """The first processor's ``PROCESSOR_FIELDS``, from a file like Linux' ``/proc/cpuinfo``."""
    found: dict[str, str] = {}
    try:
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            found.setdefault(name.strip(), value.strip())
    except OSError:
        return platform.processor() or platform.machine()
    return " ".join(found[name] for name in PROCESSOR_FIELDS if name in found) or platform.machine()


HEALTHY, DIVERGENT, AFFECTED = "healthy", "divergent", "affected"
NOT_COMPARABLE, DIED, HUNG, STOPPED, ABSENT = "not comparable", "died", "hung", "stopped", "no answer"
"""Verdicts. affected: received wrong values of a divergent rank; inconclusive: something is wrong, and this rank is one
of several that may have caused it; stopped: ended because another rank died or hung."""
FINEST = "gemm"


@dataclass(frozen=True)
class GoldenComparison:
    """Comparison of one rank's trace of one run with the golden one.

    Args:
        first: the first in execution order; None if none differs.
        key: its execution key, comparable between ranks of one cell.
    """

    compared: int
    divergences: int
    first: Address | None = None
    key: tuple[int, ...] = ()


@dataclass(frozen=True)
class GoldenVerdict:
    """The verdict on one rank.

    Args:
        status: one of the module's verdicts.
        wrong_runs: runs in which this rank was the first to differ; of an inconclusive one, runs that leave it open.
        addresses: addresses of the results that differed in the first of these runs.
        first: the first of these addresses.
        detail: text for people: which part of the key differs, how the process ended.
        compared: number of results that were compared, over all runs.
    """

    status: str
    runs: int = 0
    wrong_runs: int = 0
    addresses: int = 0
    first: Address | None = None
    detail: str = ""
    compared: int = 0


def trace_gaps(trace: TraceSection, recomputes: bool) -> tuple[str, ...]:
    """Settings that exclude results from a trace; with any, a rank's first difference may be a value it received."""
    missing = set(PHASES) - set(trace.phases) - (set() if recomputes else {RECOMPUTE})
    gaps = [] if not missing else [f"phases without {', '.join(phase for phase in PHASES if phase in missing)}"]
    if trace.granularity != FINEST:
        gaps.append(f"granularity {trace.granularity}")
    if trace.interval != 1:
        gaps.append(f"interval {trace.interval}")
    gaps += [f"{name} {value}" for name in ("micro_batches", "layers") if (value := getattr(trace, name)) is not None]
    return tuple(gaps)


def judge_cell(
    findings: Mapping[int, Iterable[GoldenComparison]], layout: ParallelDims, gaps: Sequence[str] = ()
) -> dict[int, GoldenVerdict]:
    """Name the divergent ranks of one cell.

    Args:
        findings: by rank in the cell, one a run, in the same order on all ranks; a rank that did not finish has fewer.
        gaps: from ``trace_gaps``; without effect for a cell of one rank, which receives nothing.

    Returns:
        By rank: healthy, divergent, affected, inconclusive, or not comparable where nothing was compared.
    """
    runs = {rank: list(findings.get(rank, ())) for rank in range(layout.world_size)}
    given: dict[int, list[tuple[str, str, GoldenComparison]]] = {rank: [] for rank in runs}
    for number in range(max(map(len, runs.values()), default=0)):
        of_run = {rank: of_rank[number] for rank, of_rank in runs.items() if number < len(of_rank)}
        for rank, (status, reason) in _judge_run(of_run, layout, gaps).items():
            given[rank].append((status, reason, of_run.get(rank, GoldenComparison(0, 0))))
    return {rank: _of_all_runs(runs[rank], given[rank]) for rank in runs}


def _of_all_runs(runs: list[GoldenComparison], given: list[tuple[str, str, GoldenComparison]]) -> GoldenVerdict:
    compared = sum(finding.compared for finding in runs)
    for status in (DIVERGENT, INCONCLUSIVE):
        those = [(reason, finding) for one, reason, finding in given if one == status]
        if those:
            reason, first = those[0]
            return GoldenVerdict(
                status, len(runs), len(those), first.divergences, first.first, detail=reason, compared=compared
            )
    if runs and not compared:
        nothing = "no result was compared: the golden trace holds none of this rank; record it again"
        return GoldenVerdict(NOT_COMPARABLE, len(runs), detail=nothing)
    return GoldenVerdict(AFFECTED if given else HEALTHY, len(runs), compared=compared)


def _judge_run(
    of_run: Mapping[int, GoldenComparison], layout: ParallelDims, gaps: Sequence[str]
) -> dict[int, tuple[str, str]]:
    """Status and reason, by rank, of the ranks that differ or are suspect in one run."""
    differing = {rank: finding for rank, finding in of_run.items() if finding.key}
    if not differing:
        return {}
    silent = [rank for rank in range(layout.world_size) if rank not in of_run or not of_run[rank].compared]
    reason = ""
    if silent:
        reason = f"{_ranks(silent)} reported no result of this run, and may have computed something else first"
    elif gaps and layout.world_size > 1:
        reason = f"the trace lacks what this rank may have received ({'; '.join(gaps)}); record a complete one"
    if reason:
        return dict.fromkeys(differing, (INCONCLUSIVE, reason))
    given = dict.fromkeys(differing, (AFFECTED, ""))
    for suspects in _causes(differing, layout):
        if len(suspects) == 1:
            given[suspects[0]] = DIVERGENT, ""
        else:
            begun = min((differing[rank] for rank in suspects if rank in differing), key=lambda one: one.key)
            reason = (
                f"one of {_ranks(suspects)}: the first difference, {begun.first}, comes after they exchanged values"
            )
            given |= dict.fromkeys(suspects, (INCONCLUSIVE, reason))
    return given


def _causes(differing: Mapping[int, GoldenComparison], layout: ParallelDims) -> list[list[int]]:
    """Groups of ranks; as far as can be known, exactly one rank of each group is a cause."""
    start = min(differing.values(), key=lambda finding: finding.key).first
    assert start is not None, "a finding with a key has an address"
    begun = {
        rank: finding.first.phase
        for rank, finding in differing.items()
        if finding.first is not None and finding.first.step == start.step
    }
    if start.phase in REPLICA_PHASES:  # until gradients are summed, replicas exchange no values
        causes = []
        for dp_rank in range(layout.data):
            own = {
                rank: differing[rank].key
                for rank, phase in begun.items()
                if phase in REPLICA_PHASES and layout.at(rank).dp_rank == dp_rank
            }
            causes += _of_replica(own, begun)
        return causes
    first = [rank for rank, phase in begun.items() if phase == start.phase]
    if start.phase == UPDATE:  # the norm of the whole gradient affects every update
        return [first]
    causes = []
    for group in sorted({tuple(_replicas_of(layout, rank)) for rank in first}):
        holders = [rank for rank in group if rank in first]
        # Only a shard's owner records the sum: any rank of the group may be wrong. A lone wrong copy is its holder's.
        causes.append(holders if start.phase == PARAMETER and len(holders) == 1 else list(group))
    return causes


def _of_replica(own: Mapping[int, tuple[int, ...]], begun: Mapping[int, str]) -> list[list[int]]:
    """Ranks of one replica that differed first, before gradients were summed over replicas."""
    if not own:
        return []
    earliest = min(own.values())
    first = [rank for rank, key in own.items() if key == earliest]
    if begun[first[0]] == ACCUMULATED_GRAD:  # tied stages and tensor ranks sum some gradients
        return [list(own)]
    return [[rank] for rank in first]  # at the same place, neither received it from the other


def _replicas_of(layout: ParallelDims, rank: int) -> list[int]:
    """The ranks that hold the same parameters."""
    own, every = layout.at(rank), map(layout.at, range(layout.world_size))
    return [one.rank for one in every if (one.tp_rank, one.pp_rank) == (own.tp_rank, own.pp_rank)]


def _ranks(ranks: Collection[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of the cell"


@dataclass(frozen=True)
class GoldenRun:
    """One rank's result of one run of the workload, compared with the trace.

    ``expected`` and ``got`` are the checksums of the first result that differs, None where there is none;
    ``differing`` counts results by phase and submodule.
    """

    finding: GoldenComparison
    expected: int | None = None
    got: int | None = None
    differing: Mapping[tuple[str, str], int] = field(default_factory=dict)

    def alike(self, other: GoldenRun) -> bool:
        """Whether both have the same first difference."""
        return (self.finding.first, self.got) == (other.finding.first, other.got)


@dataclass(frozen=True)
class GoldenAnswer:
    """Results of all ranks, the same on all of them except ``seconds``.

    ``runs`` are by rank, one entry for each case and repeat, all cases of a repeat in turn; ``judged`` are the verdicts
    by rank, of each run.
    """

    runs: Sequence[Sequence[GoldenRun]]
    cases: int
    judged: Sequence[Mapping[int, GoldenVerdict]]
    seconds: float

    @property
    def compared(self) -> int:
        """Number of results that were compared, over all ranks and runs."""
        return sum(one.finding.compared for of_rank in self.runs for one in of_rank)

    def ranks(self, *statuses: str) -> list[int]:
        """Ranks with one of these statuses in some run."""
        return [rank for rank in range(len(self.runs)) if any(one[rank].status in statuses for one in self.judged)]

    @property
    def verified(self) -> dict[int, bool]:
        """Whether a rank reproduces the trace, by rank; absent: it received wrong values, or cannot be judged."""
        healthy = [rank for rank in range(len(self.runs)) if all(one[rank].status == HEALTHY for one in self.judged)]
        return dict.fromkeys(healthy, True) | dict.fromkeys(self.ranks(DIVERGENT), False)

    @property
    def counts(self) -> Counts:
        """Number of results that differ, over all runs, by phase, submodule and rank."""
        counts: Counts = {}
        for rank, of_rank in enumerate(self.runs):
            for (phase, fqn), count in sum((Counter(one.differing) for one in of_rank), Counter()).items():
                counts.setdefault(phase, {}).setdefault(fqn, {})[rank] = count
        return counts

    def rulings(self, step: int, earlier: Collection[int] = ()) -> tuple[RankVerdict, ...]:
        """Rulings on the ranks that differ: one for each named rank, and one for all of which none can be named.

        Empty: all ranks agree with the trace. ``step``: of the run, under which results are reported; ``earlier``:
        ranks that were wrong in an earlier event of the run.
        """
        found = [self._rule(rank, step, rank in earlier) for rank in self.ranks(DIVERGENT)]
        named = {ruling.rank for ruling in found}
        unclear = tuple(rank for rank in self.ranks(INCONCLUSIVE) if rank not in named)
        if unclear:
            begun = [one for rank in unclear for one in self.runs[rank] if one.finding.first is not None]
            address = min(begun, key=lambda one: one.finding.key).finding.first
            assert address is not None, "only those that differ"
            found.append(RankVerdict(None, INCONCLUSIVE, GOLDEN, replace(address, step=step), suspects=unclear))
        return tuple(found)

    def finding(self, step: int, earlier: Collection[int] = ()) -> Finding | None:
        """Finding with the rulings on the ranks that differ, as of ``rulings``; None: all agree with the trace."""
        rulings = self.rulings(step, earlier)
        return Finding("golden", None, rulings, self.compared, self.counts) if rulings else None

    def _rule(self, rank: int, step: int, earlier: bool) -> RankVerdict:
        number = next(index for index, of_run in enumerate(self.judged) if of_run[rank].status == DIVERGENT)
        first = self.runs[rank][number]
        again = [one for one in range(number % self.cases, len(self.judged), self.cases) if one != number]
        wrong = sum(self.judged[one][rank].status == DIVERGENT for one in again)
        healthy = sum(self.judged[one][rank].status == HEALTHY for one in again)
        bound = None
        if not again:
            verdict = INCONCLUSIVE
        elif all(self.runs[rank][one].alike(first) for one in again):
            verdict = PERSISTENT
        elif wrong or number >= self.cases or (healthy and earlier):
            verdict = INTERMITTENT
        elif healthy == len(again):
            verdict, bound = NOT_REPRODUCED, rate_bound(healthy)
        else:
            verdict = INCONCLUSIVE  # in some repeat it may have received wrong values of another rank
        address = first.finding.first
        assert address is not None, "a divergent rank has a first difference"
        got = {} if first.got is None else {rank: first.got}
        address = replace(address, step=step)
        return RankVerdict(rank, verdict, GOLDEN, address, wrong, len(again), bound, expected=first.expected, got=got)


def compare_run(expected: Trace, got: Trace, dims: ParallelDims) -> GoldenRun:
    """Compare one rank's trace of one run with the golden one; ``dims`` are the rank's in its cell."""
    found = compare_rank(dims.rank, expected, got)
    compared = max(len(expected), len(got))
    if not found:
        return GoldenRun(GoldenComparison(compared, 0))
    key, first = min(((execution_key(one.address, one.place, dims), one) for one in found), key=lambda pair: pair[0])
    differing = Counter((one.address.phase, one.address.fqn) for one in found)
    return GoldenRun(GoldenComparison(compared, len(found), first.address, key), first.expected, first.got, differing)


def judge_replicas(
    findings: Sequence[GoldenComparison], dims: ParallelDims, gaps: Sequence[str] = ()
) -> dict[int, GoldenVerdict]:
    """Name the divergent ranks of one run, for each replica separately, since replicas exchange nothing before.

    ``findings`` are by rank, ``gaps`` come from ``trace_gaps``.
    """
    verdicts = {}
    cell = ParallelDims(dims.tensor, dims.pipeline, 1)
    for replica in range(dims.data):
        # A replica's ranks, in order, correspond to the ranks of a cell of one replica.
        ranks = [rank for rank in range(len(findings)) if dims.at(rank).dp_rank == replica]
        judged = judge_cell({place: [findings[rank]] for place, rank in enumerate(ranks)}, cell, gaps)
        verdicts.update({rank: judged[place] for place, rank in enumerate(ranks)})
    return verdicts


def compare_ranks(
    host: Host, run: Callable[[], list[GoldenRun]], layout: ParallelDims, gaps: Sequence[str], repeats: int
) -> GoldenAnswer:
    """Compare the ranks of a training with a golden trace once, and, if one differs, ``repeats`` more times.

    Args:
        run: computes all cases of the workload on this rank, and compares each.
        layout: layout in which ranks exchange values; ``gaps``: see ``judge_replicas``.

    Raises:
        MegasdcError: of ``run``, see ``on_all_ranks``.

    Collective: all ranks of the world.
    """
    start, runs = time.perf_counter(), list[list[GoldenRun]]()
    for _ in range(1 + repeats):
        again = gather_objects(on_all_ranks(host, run), host.host_group)
        runs = [old + new for old, new in zip(runs, again, strict=True)] if runs else again
        if not any(one.finding.key for of_rank in runs for one in of_rank):
            break
    judged = [judge_replicas([one.finding for one in of_run], layout, gaps) for of_run in zip(*runs, strict=True)]
    return GoldenAnswer(runs, len(again[0]), judged, time.perf_counter() - start)
