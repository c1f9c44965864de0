"""Does the severest action follow from a finding, and is it reported whole, whatever the host cannot say?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megasdc.common.addresses import FORWARD, UPDATE, Address
from megasdc.config.detection import PolicySection
from megasdc.config.guard import GuardPolicySection
from megasdc.events import EventLog, read_events
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.finding import Finding, Suspects, describe_ruling
from megasdc.sdc.incident import Environment, incident_from_json
from megasdc.sdc.policy import Describe, choose_action, report_finding, what_to_do
from megasdc.sdc.verdict import INCONCLUSIVE, MAJORITY, NOT_REPRODUCED, PERSISTENT, RankVerdict

DIMS = ParallelDims(1, 1, 1)


def found(*verdicts: str) -> Finding:
    """A finding with a ruling of each verdict on rank 0."""
    address = Address(7, 0, FORWARD, "1.layer.mlp", "output")
    return Finding("audit", 0, tuple(RankVerdict(0, verdict, MAJORITY, address) for verdict in verdicts), compared=3)


@pytest.mark.parametrize(
    ("policy", "verdicts", "action"),
    [
        (PolicySection(), [NOT_REPRODUCED], "repair"),
        (PolicySection(), [NOT_REPRODUCED, PERSISTENT], "halt"),
        (PolicySection(persistent="isolate"), [PERSISTENT, NOT_REPRODUCED], "isolate"),
        (PolicySection(not_reproduced="warn", inconclusive="repair"), [NOT_REPRODUCED, INCONCLUSIVE], "repair"),
        (GuardPolicySection(), [NOT_REPRODUCED], "warn"),
        (GuardPolicySection(), [NOT_REPRODUCED, INCONCLUSIVE], "halt"),
    ],
)
def test_the_severest_action_of_all_rulings_is_chosen(policy: PolicySection, verdicts: list[str], action: str) -> None:
    """Whatever their order; halt is severer than to isolate, that than to repair, and that than to warn."""
    assert choose_action(policy, found(*verdicts)) == action


@pytest.mark.parametrize(("tier", "place"), [("state", "state"), ("update", "update")])
def test_a_finding_on_state_is_no_update(tier: str, place: str) -> None:
    """In words; its address stays one of the update, in which a check looks at it."""
    ruling = RankVerdict(1, NOT_REPRODUCED, "own copy", Address(21, None, UPDATE, "fc1", "weight.exp_avg"))
    told = f"rank 1 at step 21, {place} of fc1 (weight.exp_avg): not_reproduced, own copy"
    assert Finding(tier, None, (ruling,)).text == told and describe_ruling(ruling)["address"] == str(ruling.address)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Any]:
    """A training of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    engine = SimpleNamespace(device=torch.device("cpu"))
    yield SimpleNamespace(engine=engine, dims=DIMS, host_group=None, events=EventLog(tmp_path, 0), folder=tmp_path)
    dist.destroy_process_group()


def report(host: Any, describe: Describe, *alert_command: str) -> tuple[str | None, Suspects]:
    """Report a finding; the page, and the suspects then."""
    suspects = Suspects()
    suspects.on_start(host)
    return report_finding(host, suspects, 7, found(PERSISTENT), "halt", describe, alert_command), suspects


def environment(gaps: list[str]) -> Mapping[str, Any]:
    """Fields of the host, which cannot read many files."""
    gaps += [f"file {number}" for number in range(9)]
    return {"environment": Environment({}, DIMS.layout, "fp32")}


def test_a_finding_is_reported_whole(host: Any, tmp_path: Path) -> None:
    """By events, an incident with what happened before, an alert that holds it, and the device's name for later."""
    host.events.emit("sdc", "finding", step=3)
    page, suspects = report(host, environment, "dd", f"of={tmp_path / 'alert'}")
    assert page is not None and Path(page).is_file() and what_to_do(page) == f"What to do: {page}"
    text = Path(page).with_suffix(".json").read_text()
    incident = incident_from_json(text)
    assert [(one.step, one.name) for one in incident.earlier] == [(3, "finding"), (7, "verdict")]
    assert incident.not_read == (*(f"file {number}" for number in range(5)), "and 4 more")
    assert (incident.policy, incident.done, incident.flagged[0].rank) == ("halt", "halted", 0)
    assert (tmp_path / "alert").read_text() == text
    assert suspects.ranks == {0}


def test_what_cannot_be_reported_keeps_nobody_waiting(host: Any, tmp_path: Path) -> None:
    """Neither an error of the host's own fields nor an alert that fails is raised; the event of the ruling is there."""

    def fails(gaps: list[str]) -> Mapping[str, Any]:
        raise RuntimeError("no environment")

    page, suspects = report(host, fails)
    assert page is None and what_to_do(page) == "The incident report could not be written"
    assert suspects.ranks == {0}
    page, _ = report(host, environment, "false")
    assert page is not None
    assert [(one.kind, one.name) for one in read_events(tmp_path)] == [
        ("sdc", "verdict"),
        ("sdc", "verdict"),
        ("health", "alert_failed"),
    ]
