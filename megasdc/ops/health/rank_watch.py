"""A thread of each rank for its host's agent: durations, what every thread does, what collectives came to, the end.

The main thread may be blocked in a collective for half an hour; native code releases the interpreter there, so that
this thread still runs. Where it does not, the agent learns that from the missing answer, and kills the process.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from megasdc.common.durable import replacing
from megasdc.ops.health.record import HeartbeatWriter, leave_message

logger = logging.getLogger(__name__)

POLL_S = 0.25
RECENT = 20
"""Last collectives of each group that an answer holds."""
FRAMES = 40
RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
"""PyTorch's flight recorders of gloo and of NCCL; the latter only where it was built with it."""
WAITS = re.compile(
    r"\b(i?recv|i?send|wait|synchronize|item|tolist|cpu|barrier|monitored_barrier|new_group)\(|store\.get\(|ProcessGroup\w*\("
)
COMMUNICATION = ("/torch/distributed/", "/deepspeed/comm/")
"""Where whatever waits does so for other ranks."""
Leave = Callable[[int, str], None]


class RankWatch:
    """Answers the agent from creation until ``close``.

    Args:
        record: of this rank.
        leave: ends the process with an exit code, and the reason; called in the thread.
        look: called in the thread several times a second.
    """

    def __init__(self, record: HeartbeatWriter, leave: Leave, look: Callable[[], None] = lambda: None) -> None:
        self._record, self._leave, self._look = record, leave, look
        self.also: dict[str, Any] = {}
        """What answers hold beside: pp_rank, tp_rank and dp_rank, where the identity did not know them yet."""
        self._main = threading.main_thread().ident
        self._closed = threading.Event()
        self._answered = record.asked
        self._thread = threading.Thread(target=self._watch, name="health", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; idempotent."""
        self._closed.set()
        self._thread.join(timeout=10 * POLL_S)
        if not self._thread.is_alive():
            self._record.count()

    def _watch(self) -> None:
        while not self._closed.wait(POLL_S):
            self._record.count()
            if (number := self._record.asked) != self._answered:
                self._answered = number
                self._report_stacks(number)
            try:
                self._look()
            except Exception:  # whatever is wrong with the agent, this rank can still be asked, and leave
                logger.exception("this host's agent could not be looked after")
            if self._record.must_leave:
                self._leave(*leave_message(self._record.folder))
                return

    def _report_stacks(self, number: int) -> None:
        frames = self._frames()
        answer: dict[str, Any] = {"stacks": stacks(), "where": where(frames), "may_wait": may_wait(frames), **self.also}
        try:
            answer["groups"] = collectives()
        except Exception as error:  # what PyTorch keeps to itself may have changed
            answer["problem"] = f"collectives of this rank cannot be read: {error!r}"
            logger.warning("%s", answer["problem"])
        try:
            with replacing(answer_path(self._record.folder, self._record.rank), "w") as file:
                json.dump(answer, file)
        except OSError as error:
            logger.warning("stacks of this rank could not be written: %s", error)
            return
        self._record.mark_answered(number)

    def _frames(self) -> traceback.StackSummary:
        assert self._main is not None
        return traceback.extract_stack(sys._current_frames().get(self._main))


def where(frames: Sequence[traceback.FrameSummary]) -> str:
    """Innermost line that is of this project or of the user, not of a library; empty: none is."""
    own = [one for one in frames if "site-packages" not in one.filename and "/lib/python" not in one.filename]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno} {own[-1].name}" if own else ""


def may_wait(frames: Sequence[traceback.FrameSummary]) -> bool:
    """Whether the innermost line, of any library, calls what may wait for another rank or for a device."""
    if not frames:
        return False
    of_ranks = any(part in frames[-1].filename for part in COMMUNICATION)
    return of_ranks or WAITS.search(frames[-1].line or "") is not None


def answer_path(folder: Path, rank: int) -> Path:
    """File of a rank's last answer."""
    return folder / f"rank_{rank:05d}.json"


def stacks() -> dict[str, list[str]]:
    """Stack of each thread of this process by name, innermost line last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {f"{names.get(ident, 'native')} {ident}": _lines(frame) for ident, frame in sys._current_frames().items()}


def _lines(frame: FrameType) -> list[str]:
    return [f"{one.filename}:{one.lineno} {one.name}" for one in traceback.extract_stack(frame)[-FRAMES:]]


def collectives() -> dict[str, dict[str, Any]]:
    """What PyTorch knows of each group of this rank: its ranks, the last collective joined and ended, recent ones.

    A group of which its flight recorders hold no collective has joined none that others could still wait in: what they
    have dropped is older than thousands of others. Empty where the recorder is off (``TORCH_FR_BUFFER_SIZE``) or torch
    was never imported. Names of groups are those of ``torch.distributed``, the same on all ranks.
    """
    if "torch" not in sys.modules:
        return {}
    from torch._C import _distributed_c10d
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import _world

    recorded: dict[str, dict[str, Any]] = {}
    for name in RECORDERS:
        if (dump := getattr(_distributed_c10d, name, None)) is not None:
            recorded |= groups_of(json.loads(dump(True, True)))
    if not recorded:
        return {}
    found: dict[str, dict[str, Any]] = {}
    for group, ranks in list(_world.pg_group_ranks.items()):
        if isinstance(group, ProcessGroup):  # else it is the mark of groups that this rank is not in
            known = recorded.get(_world.pg_names[group], {"joined": 0, "ended": 0, "recent": {}})
            found[_world.pg_names[group]] = {**known, "ranks": sorted(ranks)}
    return found


def groups_of(recorded: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The groups of a flight recorder's dump; point-to-point transfers are left out.

    Collectives are numbered by ``collective_seq_id``, and have ended where their entry is retired. The recorder's
    ``pg_status`` is of no use: over gloo it counts transfers too, of which stages in the middle of a pipeline have more
    than others, and two collectives that end one after the other may be noted there in the opposite order.
    """
    entries: dict[str, dict[int, dict[str, Any]]] = {}
    for entry in recorded.get("entries", []):
        if not entry["is_p2p"]:
            entries.setdefault(entry["process_group"][0], {})[int(entry["collective_seq_id"])] = entry
    return {
        name: {
            "joined": max(one),
            "ended": max((number for number, entry in one.items() if entry["retired"]), default=min(one) - 1),
            "recent": {number: _text(one[number]) for number in sorted(one)[-RECENT:]},
        }
        for name, one in entries.items()
    }


def _text(entry: Mapping[str, Any]) -> str:
    """Operation, sizes, and types of a collective."""
    sizes = "".join(str(size) for size in entry["input_sizes"])
    kinds = ",".join(sorted(set(entry["input_dtypes"])))
    return f"{entry['profiling_name'].split(':')[-1]} {sizes} {kinds}".strip()
