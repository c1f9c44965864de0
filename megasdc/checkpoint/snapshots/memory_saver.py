"""Snapshots that stay in the host's memory: every few steps, each rank by itself.

A rank takes its snapshot beside training and its writer makes it whole: the checksums are compared, the files sealed,
and their digests written down. A slot is used again only once all ranks have a newer step, so that there is always one
that all of them have. A step that holds NaN or Inf on any rank is not kept, and does not count as newer. With one slot
for that, and one in the making, each further step between two snapshots is time for the writer; where every step is
kept a third slot gives it that time.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch

from megasdc.checkpoint.manifest import SHARED_STATE_FILE, installed_versions
from megasdc.checkpoint.ranks import FolderRanks, RankProblem, describe_error
from megasdc.checkpoint.save import SavedState, describe_engine, shared_state_text
from megasdc.checkpoint.snapshots.capture import capture_engine
from megasdc.checkpoint.snapshots.held import FORMAT_VERSION, GUESTS, HELD_FILE, find_held, make_within, rank_folder
from megasdc.checkpoint.snapshots.messages import Join, Listen, StoreTask, TaskResult
from megasdc.checkpoint.snapshots.partner import partner_of
from megasdc.checkpoint.snapshots.snapshot import Snapshot
from megasdc.checkpoint.snapshots.writer_process import POLL_S, WriterProcess
from megasdc.parallel.collectives import MIN, Field
from megasdc.parallel.dims import ParallelDims

logger = logging.getLogger(__name__)


class _Slot:
    """Shared memory for one step.

    Args:
        top: folder of the run.
        folder: of the slot, within it.

    Attributes:
        step: that it holds or will hold, 0: none.
        is_whole: whether this start has made it whole.
    """

    def __init__(self, top: Path, folder: Path, device: torch.device) -> None:
        self._top, self.folder, self.step, self.is_whole = top, folder, 0, False
        self.snapshot = Snapshot(device)

    def empty(self) -> None:
        """Make it hold nothing.

        Raises:
            OSError: the folder cannot be made.
        """
        self.is_whole = False
        make_within(self._top, self.folder)
        (self.folder / HELD_FILE).unlink(missing_ok=True)


class MemorySaver:
    """Keeps the last steps of this rank in memory.

    Args:
        folder: of the run, in shared memory.
        run: its id.
        start: number of this start of the run, the first is 1.
        place: of this rank, among ranks with node-local storage.
        interval: steps between snapshots.

    Attributes:
        fields: what all ranks agree on in each step.
        skipped: snapshots that were due and not taken, since no slot was free.
        failed: snapshots that a rank could not take.
        stalled_s: seconds that training stood still for the last one.
    """

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
        self._folder, self._run, self._start, self._dims, self._place = folder, run, start, dims, place
        self._address: str | None = None
        own = rank_folder(folder, dims.rank)
        self._slots = [_Slot(folder, own / f"slot_{number}", device) for number in range(2 if interval > 1 else 3)]
        self._writer = WriterProcess(describes=False)
        self._making: _Slot | None = None
        self._texts: dict[str, str] = {}
        self._finite_step: int | None = None
        self._engine: dict[str, Any] = {}
        self._taken_at = 0.0
        self._sent: deque[_Slot] = deque()
        self._newest = self._adopted = 0
        self._non_finite = 0
        self._problem: RankProblem | None = None
        self.skipped = self.failed = 0
        self.stalled_s = 0.0
        self._whole = Field(self._own_newest, reduction=MIN)
        self._trouble = Field(lambda: float(self._problem is not None))
        self._bad = Field(lambda: float(self._non_finite))
        self.fields = (self._whole, self._trouble, self._bad)

    @property
    def whole(self) -> int:
        """Newest step that all ranks hold; 0: none yet."""
        return int(self._whole.value)

    def adopt(self, step: int) -> bool:
        """Keep what an earlier start holds of a step, until all ranks have something newer; whether it holds that.

        A slot has the same name here and at the partner.

        Collective: all ranks of the world.
        """
        held = find_held(self._folder, self._run)[0] if self._place.leader else []
        own = {(one.record.rank, one.folder.name) for one in held if one.record.step == step}
        names = set[tuple[int, str]]().union(*self._place.gather(own))
        for slot in self._slots:
            if (self._dims.rank, slot.folder.name) in names:
                slot.step = step
        self._adopted = step if names else 0
        return bool(names)

    def join_partners(self, address: str) -> str | None:
        """Let another host keep copies of what this one holds, and keep those of another one.

        Args:
            address: of this host, by which others reach it.

        Returns:
            Why that is not possible, the same on all ranks; None: it is.

        Collective: all ranks of the world.
        """
        self._address = address
        door = self._ask(Listen(self._folder, address))
        doors = self._place.gather((address, door))
        partner = partner_of(self._dims, self._place.nodes, self._dims.rank)
        problem = door.problem
        if partner is None:
            problem = "there is only one host"
        elif not problem and not doors[partner][1].problem:
            there, other = doors[partner]
            problem = self._ask(Join(there, other.port, other.token)).problem
        problems = [(node, one) for node, one in self._place.gather((self._place.node, problem)) if one]
        return f"{problems[0][0]}: {problems[0][1]}" if problems else None

    def _ask(self, task: Listen | Join) -> TaskResult:
        try:
            return self._writer.ask(task)
        except OSError as error:
            return TaskResult(describe_error(error, "reach the writer").text)

    def begin(self, engine: Any, step: int, state: SavedState) -> bool:
        """Begin a snapshot of the state after a step; returns whether a slot was free.

        Collective: all ranks of the world.
        """
        free = min(
            (one for one in self._slots if one.step < max(self.whole, 1)), key=lambda one: one.step, default=None
        )
        if free is None or self._making is not None:
            self.skipped += 1
            self._writer.hurry()
            return False
        started = time.monotonic()
        files, problem = capture_engine(engine, self._dims, self._place, state)
        free.step = step
        if problem is None:
            try:
                free.empty()
                free.snapshot.prepare(files, free.folder)
                free.snapshot.take(files)
            except OSError as error:
                problem = describe_error(error, f"allocate memory in {free.folder}")
        self._making, self._problem = free, self._problem or problem
        self._texts = {SHARED_STATE_FILE: shared_state_text(state)} if self._place.leader else {}
        self._engine, self._taken_at = describe_engine(engine), time.time()
        self._finite_step = state.finite_step
        self.stalled_s = time.monotonic() - started
        return True

    def wait_for_copy(self) -> None:
        """Wait until the snapshot is copied, and let it be made whole; before the optimizer changes anything."""
        slot = self._making
        if slot is None:
            return
        started = time.monotonic()
        self._making = None
        try:
            if slot.snapshot.is_copying:
                if self._address is not None and not self._writer.lives:
                    raise ChildProcessError("the writer that was joined with its partner has ended")
                files = slot.snapshot.wait()
                if all(one.finite for one in files):
                    store = StoreTask(files, slot.folder, in_place=True, texts=self._texts, held=self._head(slot))
                    self._writer.send(store)
                    self._sent.append(slot)
                else:
                    self._non_finite = slot.step
        except (OSError, RuntimeError) as error:
            self._problem = describe_error(error, "keep the snapshot")
        self.stalled_s += time.monotonic() - started

    def _head(self, slot: _Slot) -> dict[str, Any]:
        """The record of a slot but for its files."""
        dims = self._dims
        return {
            "format_version": FORMAT_VERSION,
            "run": self._run,
            "start": self._start,
            "step": slot.step,
            "time": self._taken_at,
            "rank": dims.rank,
            "host": self._place.node,
            "layout": [dims.tensor, dims.pipeline, dims.data],
            "engine": self._engine,
            "versions": installed_versions(),
            "finite_step": self._finite_step,
        }

    def _own_newest(self) -> float:
        while self._sent and (answer := self._writer.answer()) is not None:
            slot = self._sent.popleft()
            if answer.problem:
                self._problem = RankProblem(answer.problem, answer.is_storage)
            else:
                self._newest, slot.is_whole = slot.step, True
        return float(self._newest)

    def finish(self) -> None:
        """Wait until all snapshots are whole that this rank and the others have begun, or have failed.

        Collective: all ranks of the world.
        """
        self.wait_for_copy()
        self._writer.hurry()
        while self._sent:
            self._own_newest()
            time.sleep(POLL_S)
        self._place.gather(None)  # a writer that ends no longer receives what others send it

    def advance(self) -> str | None:
        """After a step: where a rank has failed, give up what is in the making; returns what happened.

        So it is where the last snapshot holds NaN or Inf on some rank, for that alone.

        Collective: all ranks of the world where one has a problem.
        """
        told = self._give_up_non_finite(int(self._bad.value)) if self._bad.value else None
        if not self._trouble.value:
            return told
        return self._give_up()

    def _give_up_non_finite(self, step: int) -> str:
        """Empty the slots of a step that is not finite on some rank, here once the writer is done with it."""
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

    def _give_up(self) -> str:
        """Give up what is in the making, since a rank has failed.

        Collective: all ranks of the world.
        """
        self.failed += 1
        answers = self._place.gather((self._place.node, self._problem))
        self._problem, self._making = None, None
        self._writer.close()
        self._sent.clear()
        for slot in self._slots:
            if slot.step > max(self.whole, self._adopted):  # not what the run went on from
                slot.snapshot.close()
                slot.empty()
                slot.step = 0
        self._newest = min(self._newest, self.whole)
        rank, (node, problem) = next((rank, one) for rank, one in enumerate(answers) if one[1] is not None)
        told = f"rank {rank} on {node}: {problem.text}"
        if self._address is not None and (apart := self.join_partners(self._address)) is not None:  # writers are new
            told += f"; no host keeps copies for another: {apart}"
        return told

    def measure(self, engine: Any, state: SavedState) -> tuple[int, int]:
        """Bytes that all slots of this rank, and those that its writer keeps for others, take together.

        Returns:
            Bytes, and how many of them are taken already.

        Collective: all ranks of the world.
        """
        files, problem = capture_engine(engine, self._dims, self._place, state)
        own = 0 if problem is not None else len(self._slots) * sum(one.layout.size_bytes for one in files)
        sizes, folders = self._place.gather(own), [rank_folder(self._folder, self._dims.rank)]
        if self._address is not None:
            for rank, size in enumerate(sizes):
                if partner_of(self._dims, self._place.nodes, rank) == self._dims.rank:
                    own += size
                    folders.append(rank_folder(self._folder / GUESTS, rank))
        return own, sum(path.stat().st_size for folder in folders for path in folder.glob("*/*.pt"))

    def reserve(self, engine: Any, state: SavedState) -> None:
        """Allocate the memory of slots that hold nothing and start the writer, so that no snapshot waits for that.

        Collective: all ranks of the world.
        """
        files, problem = capture_engine(engine, self._dims, self._place, state)
        with contextlib.suppress(OSError):  # the first snapshot reports it
            for slot in self._slots:
                if problem is None and not slot.step:
                    slot.empty()
                    slot.snapshot.prepare(files, slot.folder)
            self._writer.start()

    def close(self) -> None:
        """End the writer; what is held stays."""
        self._writer.close()
        for slot in self._slots:
            slot.snapshot.close()
