"""The live view of a launch of replicas of Local-SGD: each replica's own, and what they have together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from megasdc.common.errors import DataError
from megasdc.ops.launch.launch_verdict import LEFT_OUT, order_by_step
from megasdc.ops.run_folder.replicas import RoundsFollower, is_of_replicas, replica_folders
from megasdc.ops.top.view import SHOWN_EVENTS, RunView, RunWatcher

_ORDER = ("running", "starting", "stuck", "silent", "ending", "gone", "failed", "stopped", "done")
"""States of replicas: the first of them that one has is that of all, since a replica goes on without another."""


class ReplicasWatcher:
    """Views of the folder of a launch of replicas, one after the other."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._rounds = folder, RoundsFollower(folder)
        self._watchers: dict[int, RunWatcher] = {}

    def read(self) -> RunView:
        """The launch now."""
        for replica, path in replica_folders(self._folder).items():
            if replica not in self._watchers:
                with suppress(DataError):  # it has not begun yet
                    self._watchers[replica] = RunWatcher(path)
        views = {replica: watcher.read() for replica, watcher in self._watchers.items()}
        rounds = self._rounds.read()
        if not views:
            return replace(_NOTHING, run_dir=str(self._folder), rounds=rounds)
        return replace(_together(views), run_dir=str(self._folder), rounds=rounds)


def watcher_of(folder: Path) -> RunWatcher | ReplicasWatcher:
    """The watcher of a run folder, or of the folder of a launch of replicas.

    Raises:
        DataError: it holds neither.
    """
    return ReplicasWatcher(folder) if is_of_replicas(folder) else RunWatcher(folder)


def _together(views: Mapping[int, RunView]) -> RunView:
    """What all replicas have together: sums, means of losses, the longest time left; texts with the replica's name."""
    every = list(views.values())
    first, states = every[0], {one.state for one in every}
    state = next((one for one in _ORDER if one in states), first.state)
    texts = "; ".join(f"replica {replica} {one.text}" for replica, one in views.items())
    alike = {one.text for one in every}
    incidents = [one.last_incident for one in every if one.last_incident is not None]
    return replace(
        first,
        state=state,
        text=alike.pop() if len(alike) == 1 else texts,
        over=all(one.over for one in every),
        step=max(one.step for one in every),
        loss=_joined([one.loss for one in every], fmean),
        eval_loss=first.eval_loss,
        step_s=_joined([one.step_s for one in every], max),
        tokens_per_s=_joined([one.tokens_per_s for one in every], sum),
        eta_s=_joined([one.eta_s for one in every], max),
        effective_ratio=None,
        quiet_s=_joined([one.quiet_s for one in every], min),
        health=any(one.health for one in every),
        hosts=(),
        slow=(),
        slow_links={},
        incidents={kind: sum(one.incidents[kind] for one in every) for kind in first.incidents},
        last_incident=max(incidents, key=lambda one: one.time, default=None),
        # Who was late is in the rounds, once for all that tell it.
        met=tuple(order_by_step([met for one in every for met in one.met if met.kind != LEFT_OUT])),
        events=tuple(
            f"replica {replica}: {text}"  # which begins with its time of the day
            for text, replica in sorted((text, replica) for replica, one in views.items() for text in one.events)
        )[-SHOWN_EVENTS:],
        local_clock=any(one.local_clock for one in every),
        notes=tuple(f"replica {replica}: {note}" for replica, one in views.items() for note in one.notes),
        of_replicas=tuple(replace(one, rounds=None) for one in every),
    )


def _joined(values: Iterable[float | None], join: Callable[[list[float]], float]) -> float | None:
    """None where it is known of none."""
    known = [one for one in values if one is not None]
    return join(known) if known else None


_NOTHING = RunView(
    run_dir="",
    state="starting",
    text="starting, no replica has begun yet",
    over=False,
    step=0,
    planned=None,
    loss=None,
    eval_loss=None,
    step_s=None,
    tokens_per_s=None,
    eta_s=None,
    effective_ratio=None,
    quiet_s=None,
    health=True,
    hosts=(),
    slow=(),
    slow_links={},
    incidents={"sdc": 0, "hang": 0},
    last_incident=None,
    met=(),
    events=(),
    local_clock=False,
    notes=(),
)
