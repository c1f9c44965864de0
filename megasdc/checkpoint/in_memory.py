"""Checkpoints in the memory of hosts: saved every few steps by each rank itself, and restored at a restart.

``MemorySaver``: a rank takes its snapshot beside training and its writer completes it: the checksums are compared, the
files sealed, and their digests recorded. A slot is used again only once all ranks have a newer step, so that there is
always one that all of them have. A step that holds NaN or Inf on any rank is not kept, and does not count as newer. Two
slots suffice, one for that step and one for the snapshot under way: the writer works during the steps between two
snapshots. Where every step is kept a third slot gives it that time.

``find_in_memory``: the newest step of which every rank's files are found and undamaged. Files of a rank that now runs
on another host are sent there. Each host gathers the files of which its ranks load a part, at any layout, in a folder
that is loaded as any other (``load_checkpoint``). Wherever the files come from, they must have the digests that were
recorded with the snapshot.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megasdc.checkpoint.files import (
    SHARED_STATE_FILE,
    hash_file,
    kind_of_file,
    rank_state_file,
    stage_file,
    step_folder,
)
from megasdc.checkpoint.host_memory import (
    GUESTS,
    RESTORE,
    SLOT_FORMAT_VERSION,
    SLOT_MANIFEST_FILE,
    Lineage,
    MemorySlot,
    SlotFile,
    SlotManifest,
    find_slots,
    make_within,
    partner_of,
    rank_folder,
    read_line,
)
from megasdc.checkpoint.manifest import (
    FORMAT_VERSION,
    FileRecord,
    Layout,
    Manifest,
    describe_engine,
    installed_versions,
    sorted_records,
    write_manifest,
    write_marker,
)
from megasdc.checkpoint.ranks import (
    CheckpointGroup,
    FolderRanks,
    RankProblem,
    describe_error,
    find_place,
    raise_on_all_ranks,
)
from megasdc.checkpoint.resume import SelectedCheckpoint, too_new
from megasdc.checkpoint.save import StateSaver
from megasdc.checkpoint.snapshot import CapturedFile, SavedState, Snapshot
from megasdc.checkpoint.writer_process import POLL_S, Join, Listen, StoreTask, TaskResult, WriterProcess
from megasdc.common.program import report_bytes
from megasdc.parallel.collectives import MIN, Field
from megasdc.parallel.dims import ParallelDims

logger = logging.getLogger(__name__)


class _Slot(Snapshot):
    """Shared memory for one step.

    Args:
        top: folder of the run in shared memory.
        folder: folder of the slot, within ``top``.
        device: device of the run's tensors.

    Attributes:
        step: step that the slot has or is being filled with; 0: none.
        is_whole: whether this start of the run has completed it.
    """

    folder: Path

    def __init__(self, top: Path, folder: Path, device: torch.device) -> None:
        super().__init__(device, folder)
        self._top, self.step, self.is_whole = top, 0, False

    def empty(self) -> None:
        """Invalidate the slot's content, before it is filled again.

        Raises:
            OSError: the folder cannot be created.
        """
        self.is_whole = False
        make_within(self._top, self.folder)
        (self.folder / SLOT_MANIFEST_FILE).unlink(missing_ok=True)

    def prepare(self, files: Sequence[CapturedFile]) -> None:
        """Empty the slot, and allocate its memory."""
        self.empty()
        super().prepare(files)


class MemorySaver(StateSaver):
    """Keeps snapshots of this rank's last steps in memory.

    Args:
        folder: folder of the run in shared memory.
        run: id of the run.
        start: number of this start of the run, the first is 1.
        place: this rank and the ranks of each host, with node-local storage.
        device: device of the run's tensors.
        interval: number of steps from one snapshot to the next.

    Attributes:
        skipped: number of snapshots that were due but not taken, since no slot was free.
    """

    _writer: WriterProcess

    def __init__(
        self,
        folder: Path,
        run: str | None,
        start: int,
        dims: ParallelDims,
        place: FolderRanks,
        device: torch.device,
        interval: int,
    ) -> None:
        own = rank_folder(folder, dims.rank)
        self._slots = [_Slot(folder, own / f"slot_{number}", device) for number in range(2 if interval > 1 else 3)]
        super().__init__(dims, place, WriterProcess(describes=False), self._slots)
        self._folder, self._run, self._start = folder, run, start
        self._address: str | None = None
        self._sent: deque[_Slot] = deque()
        self._newest = self._adopted = 0
        self._non_finite = 0
        self.skipped = 0
        self._whole = Field(self._own_newest, reduction=MIN)
        self._bad = Field(lambda: float(self._non_finite))
        self.fields = (self._whole, self._trouble, self._bad)

    @property
    def whole(self) -> int:
        """Newest step whose snapshot all ranks have completed; 0: none yet."""
        return int(self._whole.value)

    @property
    def is_under_way(self) -> bool:
        """Whether a snapshot was begun that not all ranks have completed or given up."""
        return bool(self._unfinished())

    def _unfinished(self) -> list[_Slot]:
        """Slots of steps that are newer than what all ranks have, and than what the run went on from."""
        return [one for one in self._slots if one.step > max(self.whole, self._adopted)]

    def adopt(self, step: int) -> bool:
        """Keep the slots in which an earlier start has kept a step, until all ranks have a newer one.

        A slot has the same name here and at the partner. Returns whether there are such slots.

        Collective: all ranks of the world.
        """
        held = find_slots(self._folder, self._run)[0] if self._place.leader else []
        own = {(one.record.rank, one.folder.name) for one in held if one.record.step == step}
        names = set[tuple[int, str]]().union(*self._place.gather(own))
        if not names:
            return False
        # With more ranks than before some have none; they keep one back too, since all must find the same number free.
        kept = [one for one in self._slots if (self._dims.rank, one.folder.name) in names] or self._slots[:1]
        for slot in kept:
            slot.step = step
        self._adopted = step
        return True

    def join_partners(self, address: str) -> str | None:
        """Connect with partners: another host keeps copies of this rank's slots, and this host those of other ranks.

        Args:
            address: address by which other hosts reach this one.

        Returns:
            Reason why that is not possible, the same on all ranks; None: it is done.

        Collective: all ranks of the world.
        """
        self._address = address
        door = self._run_task(Listen(self._folder, address))
        doors = self._place.gather((address, door))
        partner = partner_of(self._dims, self._place.nodes, self._dims.rank)
        problem = door.problem
        if partner is None:
            problem = "there is only one host"
        elif not problem and not doors[partner][1].problem:
            there, other = doors[partner]
            problem = self._run_task(Join(there, other.port, other.token)).problem
        problems = [(node, one) for node, one in self._place.gather((self._place.node, problem)) if one]
        return f"{problems[0][0]}: {problems[0][1]}" if problems else None

    def _run_task(self, task: Listen | Join) -> TaskResult:
        try:
            return self._writer.run_task(task)
        except OSError as error:
            return TaskResult(describe_error(error, "reach the writer").text)

    def begin(self, engine: Any, step: int, state: SavedState) -> bool:
        """Begin a snapshot of the state after a step; returns whether a slot was free.

        Collective: all ranks of the world.
        """
        free = min(
            (one for one in self._slots if one.step < max(self.whole, 1)), key=lambda one: one.step, default=None
        )
        if free is None or self._copy is not None:
            self.skipped += 1
            self._writer.hurry()
            return False
        started = time.monotonic()
        free.step = step
        texts, head = self._texts(state), self._head(engine, step, state)
        self._capture(engine, state, free, StoreTask([], free.folder, in_place=True, texts=texts, held=head))
        self.stalled_s = time.monotonic() - started
        return True

    def _store(self, snapshot: Any, task: StoreTask) -> None:
        if self._address is not None and not self._writer.lives:
            raise ChildProcessError("the writer that was joined with its partner has ended")
        if all(one.finite for one in task.files):
            self._writer.send(task)
            self._sent.append(snapshot)
        else:
            self._non_finite = snapshot.step

    def _head(self, engine: Any, step: int, state: SavedState) -> dict[str, Any]:
        """Fields of a slot's record (``SlotManifest``), without its files."""
        dims = self._dims
        return {
            "format_version": SLOT_FORMAT_VERSION,
            "run": self._run,
            "start": self._start,
            "step": step,
            "time": time.time(),
            "rank": dims.rank,
            "host": self._place.node,
            "layout": [dims.tensor, dims.pipeline, dims.data],
            "engine": describe_engine(engine),
            "versions": installed_versions(),
            "finite_step": state.finite_step,
        }

    def _own_newest(self) -> float:
        while self._sent and (answer := self._poll_result()) is not None:
            slot = self._sent.popleft()
            if not answer.problem:
                self._newest, slot.is_whole = slot.step, True
        return float(self._newest)

    def advance(self) -> str | None:
        """End a step: if a rank has a problem, give up all snapshots under way; returns a message, None: no problem.

        If the last snapshot holds NaN or Inf on a rank, only that one is given up.

        Collective: all ranks of the world if one has a problem.
        """
        told = self._discard_non_finite(int(self._bad.value)) if self._bad.value else None
        if not self._trouble.value:
            return told
        return self._abort()

    def _discard_non_finite(self, step: int) -> str:
        """Empty the slots of a step that has NaN or Inf on a rank, after this rank's writer has finished it."""
        self.failed += 1
        for slot in (one for one in self._slots if one.step == step):
            while slot in self._sent:
                self._own_newest()
                time.sleep(POLL_S)
            slot.empty()
            slot.step = 0
        self._non_finite = 0
        self._newest = max((one.step for one in self._slots if one.is_whole), default=0)
        return f"the state of step {step} is not finite"

    def _abort(self) -> str:
        """Give up the snapshots under way, since a rank has failed; returns a message.

        Collective: all ranks of the world.
        """
        self.failed += 1
        answers = self._place.gather((self._place.node, self._stop()))
        self._sent.clear()
        for slot in self._unfinished():
            slot.close()
            slot.empty()
            slot.step = 0
        self._newest = min(self._newest, self.whole)
        rank, (node, problem) = next((rank, one) for rank, one in enumerate(answers) if one[1] is not None)
        told = f"rank {rank} on {node}: {problem.text}"
        if self._address is not None and (apart := self.join_partners(self._address)) is not None:  # writers are new
            told += f"; no host keeps copies for another: {apart}"
        return told

    def _needs(self, size: int) -> tuple[int, int]:
        """Bytes of all slots of this rank and of those that its writer keeps for others, and bytes that are there."""
        own = len(self._slots) * size
        sizes, folders = self._place.gather(own), [rank_folder(self._folder, self._dims.rank)]
        if self._address is not None:
            for rank, other in enumerate(sizes):
                if partner_of(self._dims, self._place.nodes, rank) == self._dims.rank:
                    own += other
                    folders.append(rank_folder(self._folder / GUESTS, rank))
        return own, sum(path.stat().st_size for folder in folders for path in folder.glob("*/*.pt"))

    def _unused(self) -> list[_Slot]:
        return [one for one in self._slots if not one.step]


_CHUNK_BYTES = 64 << 20


@dataclass(frozen=True)
class FileSource:
    """A slot with a rank's files of a step, and the host that has it.

    ``leader``: first rank on that host now, which reads the files; ``held``: the slot.
    """

    leader: int
    held: MemorySlot


@dataclass(frozen=True)
class InMemoryCheckpoint:
    """A step that can be restored from memory.

    Attributes:
        step: optimizer step, first is 1.
        start: number of the start of the run that made the snapshots.
        sources: an undamaged slot of each rank, by rank.
        verified: whether an audit has agreed after the step.
        skipped: reason why each newer step was passed over, by step.
    """

    step: int
    start: int
    sources: dict[int, FileSource]
    verified: bool
    skipped: dict[int, str]

    @property
    def layout(self) -> Layout:
        """Layout of the run when the snapshots were taken."""
        return _layout(self.sources[0].held.record)

    @property
    def origin(self) -> str:
        """Text on the source of the files, for messages: own memory, and ranks whose files partners kept."""
        guests = [rank for rank, source in self.sources.items() if source.held.is_guest]
        return f"memory, ranks {', '.join(map(str, guests))} from their partners" if guests else "memory"

    def line(self, start: int, place: FolderRanks) -> Lineage:
        """Lineage of a start that resumes from this step.

        Args:
            start: number of that start.
            place: this rank and the hosts of the start.
        """
        made_by: dict[str, list[int]] = {}
        for rank, source in self.sources.items():
            made_by.setdefault(source.held.record.host, []).append(rank)
        return Lineage(
            start=start,
            from_start=self.start,
            from_step=self.step,
            verified=self.step if self.verified else 0,
            from_counts=self.verified or not place.lacks(made_by),
        )


def find_in_memory(
    folder: Path,
    run: str | None,
    dims: ParallelDims | None,
    ranks: CheckpointGroup,
    *,
    newest: int | None = None,
    verified_only: bool,
) -> InMemoryCheckpoint | None:
    """The newest step of which all ranks' files are in the hosts' memory; None: there is none.

    Args:
        folder: folder of the run in this host's memory.
        run: id of the run.
        dims: position in the layout that the step must have been saved with; None: any layout.
        ranks: all ranks, with node-local storage.
        newest: last step that may be used; newer ones are passed over. None: no limit.
        verified_only: whether an audit must have agreed after the step.

    Collective: all ranks of the world.
    """
    place = find_place(ranks)
    held, problems = find_slots(folder, run) if place.leader else ([], [])
    answers = place.gather((held, problems, read_line(folder) if place.leader else Lineage()))
    for line in (line for _, lines, _ in answers for line in lines):
        logger.warning("memory: %s", line)
    line = max((one for _, _, one in answers), key=lambda one: (one.start, one.verified))
    sources = [FileSource(leader, one) for leader, (those, _, _) in enumerate(answers) for one in those]
    skipped: dict[int, str] = {}
    for (step, start), those in sorted(_by_step(sources).items(), reverse=True):
        layout = _layout(those[0].held.record)
        problem = _why_not(those, layout if dims is None else Layout.of(dims))
        if not line.has(those[0].held.record):
            problem = f"start {line.start} of the run went on without it"
        elif newest is not None and step > newest:
            problem = too_new(newest)
        elif problem is None and verified_only and not line.verifies(those[0].held.record):
            problem = "no audit has agreed after it"
        if problem is None:
            whole = _check(those, place)
            chosen = {rank: own[0] for rank, own in _by_rank(whole, place).items()}
            lacking = sorted(set(range(layout.world_size)) - chosen.keys())
            if not lacking:
                return InMemoryCheckpoint(step, start, chosen, line.verifies(those[0].held.record), skipped)
            problem = f"files of rank {lacking[0]} were changed"
        skipped[step] = problem
        place.emit("skip", "memory", step=step, reason=problem)
        if place.rank == 0:
            logger.warning("step %d in memory is skipped: %s", step, problem)
    return None


def _by_step(sources: Sequence[FileSource]) -> dict[tuple[int, int], list[FileSource]]:
    found: dict[tuple[int, int], list[FileSource]] = {}
    for one in sources:
        found.setdefault((one.held.record.step, one.held.record.start), []).append(one)
    return found


def _by_rank(sources: Sequence[FileSource], place: FolderRanks) -> dict[int, list[FileSource]]:
    """Sources of each rank: first those on the host where it runs now, and a rank's own before a guest's."""
    leader_of = {rank: ranks[0] for ranks in place.nodes.values() for rank in ranks}
    found: dict[int, list[FileSource]] = {}
    for one in sorted(sources, key=lambda one: (one.leader != leader_of.get(one.held.record.rank), one.held.is_guest)):
        found.setdefault(one.held.record.rank, []).append(one)
    return found


def _why_not(sources: Sequence[FileSource], wanted: Layout) -> str | None:
    """Reason why a step cannot be restored: another layout, or ranks without a slot; None: no reason is known yet."""
    layouts = {str(_layout(one.held.record)) for one in sources}
    if layouts != {str(wanted)}:
        return f"it was made with {', '.join(sorted(layouts))}, this run has {wanted}"
    ranks = {one.held.record.rank for one in sources}
    if lacking := sorted(set(range(wanted.world_size)) - ranks):
        return f"nobody holds rank {lacking[0]}" + (f" and {len(lacking) - 1} others" if len(lacking) > 1 else "")
    return None


def _check(sources: Sequence[FileSource], place: FolderRanks) -> list[FileSource]:
    """The sources whose files all have the recorded digests; each host's ranks share the work.

    Collective: all ranks.
    """
    leader = place.ranks[0]
    own = [(index, one.held) for index, one in enumerate(sources) if one.leader == leader]
    files = [(index, held.folder, file) for index, held in own for file in held.record.files]
    mine = [files[number] for number in place.share(len(files))]
    said = "checksums of step %d in memory, on this rank: %s"
    step, total = sources[0].held.record.step, sum(file.size_bytes for _, _, file in mine)
    advance = report_bytes(lambda text: logger.info(said, step, text), total) if place.rank == 0 else None
    bad = {index for index, path, file in mine if not _is_whole(path, file, advance)}
    wrong = set[int]().union(*place.gather(bad))
    return [one for index, one in enumerate(sources) if index not in wrong]


def _is_whole(folder: Path, file: SlotFile, advance: Callable[[int], None] | None = None) -> bool:
    try:
        path = folder / file.name
        whole = path.stat().st_size == file.size_bytes and hash_file(path, advance) == file.xxh3_128
    except OSError as error:
        logger.warning("memory: %s cannot be read: %s", folder / file.name, error)
        return False
    if not whole:
        logger.warning("memory: %s was changed", folder / file.name)
    return whole


@dataclass
class _Plan:
    """Sources of the files of a host's restored folder, by file name.

    ``links``: files that are on the host already; ``sent``: files that another host's leader sends.
    """

    links: dict[str, FileSource] = field(default_factory=dict)
    sent: dict[str, FileSource] = field(default_factory=dict)


def restore(
    found: InMemoryCheckpoint, folder: Path, dims: ParallelDims, ranks: CheckpointGroup, totals: Sequence[int]
) -> SelectedCheckpoint:
    """Gather on every host the files of a step that its ranks need, as a checkpoint to load.

    Args:
        found: the step.
        folder: folder of the run in this host's memory.
        dims: this rank's position in the layout of the run now.
        ranks: all ranks, with node-local storage.
        totals: number of elements of each parameter group of this rank's optimizer, over all replicas.

    Raises:
        StorageError: memory is full, or a file cannot be read or sent; on all ranks.

    Collective: all ranks of the world.
    """
    place = find_place(ranks)
    target = folder / RESTORE / step_folder(found.step)
    problem: RankProblem | None = None
    if place.leader:
        try:
            shutil.rmtree(folder / RESTORE, ignore_errors=True)
            make_within(folder, target)
        except OSError as error:
            problem = describe_error(error, f"create {target}")
    what = f"step {found.step} cannot be restored from memory"
    raise_on_all_ranks(problem, place, what)
    everyone = place.gather(tuple(totals))
    plans = {node: _plan(here[0], _needed(found, here, dims, everyone)) for node, here in place.nodes.items()}
    manifest = _manifest(found, plans[place.node], place.node)
    try:
        _move(plans, target, place)
        if place.leader:
            write_manifest(target, manifest)
            write_marker(target, manifest)
    except OSError as error:
        problem = describe_error(error, f"write {target}")
    raise_on_all_ranks(problem, place, what)
    return SelectedCheckpoint(target, found.step, manifest, {}, [], False)


def _plan(leader: int, needed: Iterable[tuple[FileSource, list[str]]]) -> _Plan:
    """Sources of the files that the ranks of a leader's host need; a source on that host is preferred."""
    plan = _Plan()
    for source, names in needed:
        known = plan.links if source.leader == leader else plan.sent
        for name in names:
            if name not in plan.links and name not in plan.sent:
                known[name] = source
    return plan


def _needed(
    found: InMemoryCheckpoint, ranks: Sequence[int], dims: ParallelDims, totals: Sequence[Sequence[int]]
) -> Iterator[tuple[FileSource, list[str]]]:
    """Files that these ranks load: stage files, optimizer shards, the shared state; at the same layout their own state.

    ``totals``: number of elements of each parameter group of each rank's optimizer, [rank][group].
    """
    names, saved = _names(found), found.layout
    stages: set[int] = set()
    writers: set[int] = set()
    for rank in ranks:
        own = dims.at(rank)
        shards = saved.shards_for(own, totals[rank])
        for number in (number for numbers in saved.stages_for(own) for number in numbers):
            pp_rank, tp_rank = divmod(number, saved.tensor)
            stages.add(number)
            writers |= {(pp_rank * saved.data + dp_rank) * saved.tensor + tp_rank for dp_rank in shards}
    for rank in sorted(writers):
        yield found.sources[rank], [name for name in names[rank] if kind_of_file(name) == "optimizer"]
    if saved == Layout.of(dims):
        for rank in ranks:
            yield found.sources[rank], [rank_state_file(rank)]
    for name in (*map(stage_file, sorted(stages)), SHARED_STATE_FILE):
        yield found.sources[_holder(found, name, ranks[0])], [name]


def _names(found: InMemoryCheckpoint) -> dict[int, list[str]]:
    """Names of each rank's files."""
    return {rank: [one.name for one in source.held.record.files] for rank, source in found.sources.items()}


def _holder(found: InMemoryCheckpoint, name: str, leader: int) -> int:
    """The first rank whose slot has a file; slots on the leader's host come first."""
    holders = [rank for rank, names in _names(found).items() if name in names]
    return min(holders, key=lambda rank: (found.sources[rank].leader != leader, rank))


def _move(plans: Mapping[str, _Plan], target: Path, place: FolderRanks) -> None:
    """Link the files that are on this host, and send the others, host after host in the same order on all ranks.

    Raises:
        OSError: a file cannot be read or written, or did not arrive as it was; raised after all others were sent.

    Collective: the leaders of all hosts.
    """
    if not place.leader:
        return
    failed: list[OSError] = []
    for name, source in plans.get(place.node, _Plan()).links.items():
        try:
            os.link(source.held.folder / name, target / name)
        except OSError as error:
            failed.append(error)
    for node, plan in plans.items():
        receiver = place.nodes[node][0]
        for name, source in sorted(plan.sent.items()):
            file = next(one for one in source.held.record.files if one.name == name)
            try:
                if place.rank == source.leader:
                    _send(source.held.folder / name, file.size_bytes, receiver, place.among.group)
                elif place.rank == receiver:
                    _receive(target / name, file, source.leader, place.among.group)
            except OSError as error:
                failed.append(error)
    if failed:
        raise failed[0]


def _send(path: Path, size: int, to: int, group: dist.ProcessGroup | None) -> None:
    """Send a file; parts that cannot be read are sent as zeros, since the receiver waits for all of it."""
    failed: OSError | None = None
    for start in range(0, size, _CHUNK_BYTES):
        piece = bytearray(min(_CHUNK_BYTES, size - start))
        try:
            with open(path, "rb") as file:
                file.seek(start)
                file.readinto(piece)
        except OSError as error:
            failed = error
        dist.send(torch.frombuffer(piece, dtype=torch.uint8), to, group=group)
    if failed is not None:
        raise failed


def _receive(path: Path, told: SlotFile, sender: int, group: dist.ProcessGroup | None) -> None:
    """Receive a file and compare it with its digest; all of it is received even if it cannot be written."""
    failed: OSError | None = None
    for start in range(0, told.size_bytes, _CHUNK_BYTES):
        piece = torch.empty(min(_CHUNK_BYTES, told.size_bytes - start), dtype=torch.uint8)
        dist.recv(piece, sender, group=group)
        try:
            with open(path, "ab") as file:
                file.write(piece.numpy().data)
        except OSError as error:
            failed = error
    if failed is not None:
        raise failed
    if not _is_whole(path.parent, told):
        raise OSError(f"{told.name} did not arrive as it was sent")


def _manifest(found: InMemoryCheckpoint, plan: _Plan, node: str) -> Manifest:
    """Manifest of the folder restored on a host, which has files of any ranks."""
    record: SlotManifest = found.sources[0].held.record
    names = {**plan.links, **plan.sent}
    files = [
        FileRecord(
            name=file.name,
            size_bytes=file.size_bytes,
            xxh3_128=file.xxh3_128,
            rank=source.held.record.rank,
            node=source.held.record.host,
            tensors=file.tensors,
        )
        for name, source in names.items()
        for file in source.held.record.files
        if file.name == name
    ]
    return Manifest(
        format_version=FORMAT_VERSION,
        state="complete",
        step=found.step,
        save_id=uuid.uuid5(uuid.NAMESPACE_OID, f"{record.run} {found.start} {found.step}").hex,
        time=record.time,
        layout=found.layout,
        world_size=found.layout.world_size,
        storage="shared",
        nodes={node: list(range(found.layout.world_size))},
        node=None,
        engine=record.engine,
        versions=record.versions,
        files=sorted_records(files),
        not_finite=[],  # no rank keeps a step that holds NaN or Inf on any
        finite_step=record.finite_step,
    )


def _layout(record: SlotManifest) -> Layout:
    return Layout(**dict(zip(("tensor", "pipeline", "data"), record.layout, strict=True)))
