"""Stress test: rounds of tests on all hosts at once, saved after each round, judged at the end or on Ctrl-C."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megasdc.ops.launch.hosts import LOCAL_HOST, without_user
from megasdc.ops.launch.remote import Transport
from megasdc.ops.stress.arrange import pairings, turns_of_round
from megasdc.ops.stress.drill import DrillRequest, summarize_drills
from megasdc.ops.stress.golden import GoldenFolder
from megasdc.ops.stress.host import HostLinks, WorkerId
from megasdc.ops.stress.host_verdict import HostVerdict
from megasdc.ops.stress.pair_links import add_figures, measure_pairs
from megasdc.ops.stress.result import stress_outcome
from megasdc.ops.stress.state import (
    ALONE,
    COLLECTIVES,
    GEMM,
    LINKS,
    TESTS,
    TRAINING,
    Count,
    HostState,
    load_state,
    save_state,
)
from megasdc.output.outcome import Outcome

MEETINGS = 3
"""Partners of a host in a round; with two or more, a host that is always wrong is named in the first round."""

Progress = Callable[[int, int | None], None]
"""Called with the rounds done and their total; None where the time is limited instead."""


@dataclass(frozen=True)
class StressPlan:
    """Configuration of a stress test.

    Args:
        slots: number of devices by host; 0: all that it has.
        remote: over SSH; False: this host alone.
        rounds: maximum of rounds, used where ``minutes`` is None.
        minutes: time limit for starting a round; None: ``rounds`` is the limit.
        only: tests, of ``TESTS``.
        timeout_s: timeout of a host for one test of a round, in seconds.
        drill: faults on one host; None: none.
        folder: for the hosts' states after each round; None: they are not saved.
        resume: continue from the states in the folder.
        ssh_port: None: SSH's own configuration.
    """

    slots: dict[str, int] = field(default_factory=lambda: {LOCAL_HOST: 0})
    remote: bool = False
    rounds: int | None = 3
    minutes: float | None = None
    only: tuple[str, ...] = TESTS
    timeout_s: float = 300.0
    drill: DrillRequest | None = None
    golden: GoldenFolder = field(default_factory=GoldenFolder)
    folder: Path | None = None
    resume: bool = False
    ssh_port: int | None = None

    def of_host(self) -> dict[str, Any]:
        """The settings with which a host's earlier state must agree."""
        drill = None if self.drill is None else f"{self.drill.profile}@{self.drill.host}"
        return {"hosts": list(self.slots), "only": list(self.only), "drill": drill}


def stress_hosts(plan: StressPlan, on_progress: Progress = lambda done, total: None) -> Outcome[HostVerdict]:
    """Tests all hosts, and judges them; see ``run_rounds``."""
    states, drilled, interrupted = run_rounds(plan, on_progress)
    return stress_outcome(states, plan.drill, drilled, interrupted)


def run_rounds(
    plan: StressPlan, on_progress: Progress = lambda done, total: None
) -> tuple[list[HostState], list[dict[str, Any]] | None, bool]:
    """Tests all hosts; Ctrl-C ends it with what is known so far.

    Returns the states of all hosts, the effects of a drill's faults, None: not known, and whether it was interrupted.

    Raises:
        TraceError: a state to continue from is damaged or of another plan.
        StorageError: the plan's folder cannot be written.
    """
    states = {host: _state(plan, host) for host in plan.slots}
    links = HostLinks(plan.slots, Transport(plan.remote, plan.ssh_port), plan.timeout_s)
    test = _Test(plan, states, links)
    drilled: list[dict[str, Any]] | None = None
    interrupted = False
    try:
        test.start()
        first = min((states[host].rounds for host in links.alive), default=0) + 1
        started, number = time.monotonic(), first
        while links.alive and _goes_on(plan, number, first, started):
            test.run_round(number)
            on_progress(number, plan.rounds)
            number += 1
        drilled = test.drill_summary()
    except KeyboardInterrupt:
        interrupted = True
    finally:
        test.note_losses()
        links.close()
    return list(states.values()), drilled, interrupted


def _state(plan: StressPlan, host: str) -> HostState:
    if plan.folder is not None and plan.resume:
        return load_state(plan.folder, host, plan.of_host())
    return HostState(host, plan.of_host())


def _goes_on(plan: StressPlan, number: int, first: int, started: float) -> bool:
    if plan.minutes is not None:
        return number == first or time.monotonic() - started < 60.0 * plan.minutes
    return number <= (plan.rounds or 0)


class _Test:
    """The rounds of one call; updates the states of all hosts."""

    def __init__(self, plan: StressPlan, states: dict[str, HostState], links: HostLinks) -> None:
        self._plan, self._states, self._links = plan, states, links
        self._told: set[tuple[str, WorkerId]] = set()
        """Tests and processes to which the expected values have been sent."""

    def start(self) -> None:
        """Starts all hosts, and configures all their processes."""
        self._links.start()
        drill = self._plan.drill
        tasks = {
            (host, slot): {
                "do": "hello",
                "timeout_s": self._plan.timeout_s,
                "faults": drill.faults if drill is not None and drill.host == host else [],
            }
            for host, slot in self._links.places(self._links.alive, every=True)
        }
        for (host, slot), said in self._run_tasks(tasks).items():
            state = self._states[host]
            state.slots = self._links.slots[host]
            if slot == 0:
                state.key, state.on_accelerator = said["key"], said["on_accelerator"]
        self.note_losses()

    def run_round(self, number: int) -> None:
        """One round of all tests on all hosts that are alive; the states are saved at its end."""
        tests = {
            COLLECTIVES: self._collectives,
            GEMM: self._products,
            TRAINING: self._training,
            LINKS: self._measure_links,
        }
        for name in self._plan.only:
            tests[name](number)
        for host in self._links.alive:
            self._states[host].rounds += 1
        self.note_losses()
        if self._plan.folder is not None:
            for state in self._states.values():
                save_state(self._plan.folder, state)

    def drill_summary(self) -> list[dict[str, Any]] | None:
        """Effects of a drill's faults over all processes of its host; None without a drill, or if the host is lost."""
        drill = self._plan.drill
        if drill is None or drill.host not in self._links.alive:
            return None
        answers = self._run_tasks({place: {"do": "drill"} for place in self._links.places([drill.host], every=True)})
        return summarize_drills(drill.faults, list(answers.values())) if answers else None

    # --- tests ------------------------------------------------------------------------------------------------------

    def _products(self, number: int) -> None:
        tasks = {place: self._product_task(place, number) for place in self._links.places(self._links.alive)}
        for (host, slot), said in self._run_tasks(tasks).items():
            state = self._states[host]
            state.products.setdefault(str(slot), said["values"])
            state.checked += said["checked"]
            state.add_results(GEMM, number, slot, said)

    def _product_task(self, place: WorkerId, number: int) -> dict[str, Any]:
        state, task = self._states[place[0]], {"do": "gemm", "round": number}
        if not self._is_first_use(GEMM, place):
            return task
        golden = self._plan.golden.products_for(state.key)
        if golden is not None and GEMM not in state.golden:
            state.golden.append(GEMM)
        if golden is not None:
            return task | {"expected": golden, "against": "golden"}
        return task | {"expected": state.products.get(str(place[1])), "against": "first"}

    def _training(self, number: int) -> None:
        places = self._links.places(self._links.alive)
        fresh = {place for place in places if self._is_first_use(TRAINING, place)}
        tasks = {place: self._training_task(place, number, place in fresh) for place in places}
        for (host, slot), said in self._run_tasks(tasks).items():
            state = self._states[host]
            if said["trace"] is not None:
                state.runs.setdefault(str(slot), {name: said[name] for name in ("losses", "trace", "key")})
            if (host, slot) in fresh:
                self._note_golden(state, tasks[host, slot], said["differences"])
            losses = state.runs[str(slot)]["losses"]
            parted = next(
                (step for step, (a, b) in enumerate(zip(losses, said["losses"], strict=True), 1) if a != b), None
            )
            for finding in said["findings"]:
                finding["loss_step"] = parted
            state.add_results(TRAINING, number, slot, said)

    def _training_task(self, place: WorkerId, number: int, fresh: bool) -> dict[str, Any]:
        state = self._states[place[0]]
        task: dict[str, Any] = {"do": "training", "round": number, "config": None, "whole": fresh}
        if not fresh:
            return task
        golden = self._plan.golden.training_for(state.key)
        if golden is not None:
            return task | {"config": golden.config, "expected": golden.trace, "key": golden.key}
        past = state.runs.get(str(place[1]))
        return task | ({"expected": past["trace"], "key": None} if past is not None else {})

    def _note_golden(self, state: HostState, task: Mapping[str, Any], differences: Mapping[str, Any]) -> None:
        if task.get("key") is None:
            return
        if differences:
            from megasdc.sdc.golden import describe_differences  # imported already, by who read the trace

            state.add_note(f"the golden trace is not for this host: {describe_differences(differences)}")
        elif TRAINING not in state.golden:
            state.golden.append(TRAINING)

    def _collectives(self, number: int) -> None:
        alone = {(host,): self._links.places([host], every=True) for host in self._links.alive}
        self._run_collectives(number, {group: places for group, places in alone.items() if len(places) > 1})
        for pairs in self._pairs(number):
            self._run_collectives(number, {pair: self._links.places(pair) for pair in pairs})

    def _measure_links(self, number: int) -> None:
        for pairs in self._pairs(number):
            add_figures(self._states, measure_pairs(pairs, self._run_tasks, secrets.token_hex), number)

    def _pairs(self, number: int) -> Iterator[list[tuple[str, str]]]:
        """The pairs of a round, in sets whose pairs have no host in common, of hosts that are alive."""
        turns = pairings(list(self._plan.slots))
        for turn in turns_of_round(number, len(turns), MEETINGS) if turns else []:
            alive = set(self._links.alive)
            yield [pair for pair in turns[turn] if alive >= set(pair)]

    def _run_collectives(self, number: int, groups: Mapping[tuple[str, ...], Sequence[WorkerId]]) -> None:
        """Runs collectives in several groups at once, and counts each host's right and wrong ones by partner."""
        opened = self._run_tasks(
            {places[0]: {"do": "open", "towards": self._route(hosts)} for hosts, places in groups.items()}
        )
        tasks: dict[WorkerId, dict[str, Any]] = {}
        for places in groups.values():
            if places[0] not in opened:
                continue
            store = {"do": "collectives", "round": number, "ranks": len(places), **opened[places[0]]}
            for rank, place in enumerate(places):
                tasks[place] = {**store, "rank": rank}
        answers = self._run_tasks(tasks)
        for hosts, places in groups.items():
            if set(hosts) <= set(self._links.alive):  # failures with a lost partner prove nothing
                for place in places:
                    if place in answers:
                        self._note_meeting(number, hosts, place, answers[place])

    def _route(self, hosts: tuple[str, ...]) -> str | None:
        """Host to which the first one of a group leads a connection; None: the group is of one host."""
        if len(hosts) == 1:
            return None
        return without_user(hosts[-1]) if self._plan.remote else "127.0.0.1"

    def _note_meeting(self, number: int, hosts: tuple[str, ...], place: WorkerId, said: dict[str, Any]) -> None:
        host, slot = place
        partner = ALONE if len(hosts) == 1 else next(one for one in hosts if one != host)
        state = self._states[host]
        if said["failed"] is not None:
            said = {"compared": 1, "wrong": 1, "findings": [{"what": f"no collective: {said['failed']}"}]}
        state.meetings.setdefault(partner, Count()).add(said["compared"], said["wrong"])
        with_whom = "its own processes" if partner == ALONE else partner
        findings = [{**finding, "what": f"{finding['what']} with {with_whom}"} for finding in said["findings"]]
        state.add_results(COLLECTIVES, number, slot, {**said, "findings": findings})

    # --- hosts ------------------------------------------------------------------------------------------------------

    def _is_first_use(self, test: str, place: WorkerId) -> bool:
        """Whether the expected values must still be sent to a process; True once."""
        fresh = (test, place) not in self._told
        self._told.add((test, place))
        return fresh

    def _run_tasks(self, tasks: Mapping[WorkerId, Mapping[str, Any]]) -> dict[WorkerId, dict[str, Any]]:
        """Answers of processes; a host with a process that failed its task is recorded as lost."""
        answers = self._links.run_tasks(tasks)
        for (host, slot), answer in answers.items():
            if "error" in answer:
                self._links.mark_lost(host, f"process {slot}, {tasks[host, slot]['do']}: {answer['error']}")
        return {place: answer["ok"] for place, answer in answers.items() if place[0] not in self._links.lost}

    def note_losses(self) -> None:
        """Records lost hosts in their states."""
        for host, loss in self._links.lost.items():
            self._states[host].lost = {"how": loss.how, "detail": loss.detail}
