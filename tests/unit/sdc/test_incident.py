"""Does an incident report hold what is known, say what to do, and read well whatever the names and sizes?"""

from __future__ import annotations

import json
import os
import random
import re
import shlex
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from megasdc.common.addresses import BACKWARD, FORWARD, OF_AUDIT, RECOMPUTE, REDUCED_GRAD, UPDATE, WEIGHT_GRAD, Address
from megasdc.common.errors import StorageError, TraceError
from megasdc.common.words import ranges
from megasdc.events import Event
from megasdc.output.html import page_text
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.finding import Finding
from megasdc.sdc.incident import (
    DisputedRank,
    Environment,
    FlaggedRank,
    Incident,
    IncidentEvidence,
    Opinion,
    Outside,
    RankPlace,
    RoundEvidence,
    RoundLook,
    Script,
    StepFate,
    headline,
    how_often,
    incident_from_json,
    incident_to_json,
)
from megasdc.sdc.incident_page import MAX_COLUMNS, MAX_ROWS, build_heat_maps, incident_page, write_incident
from megasdc.sdc.verdict import MAJORITY, PERSISTENT, RankVerdict

VOID = {"meta", "br", "link", "img", "input", "hr"}
SUBMODULES = ["0.embedding", "1.layer.self_attention.linear_qkv", "1.layer.mlp.linear_fc1", "2.head"]


class Page(HTMLParser):
    """What a page shows and refers to; its tags must be balanced."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.references: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == [], f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [str(value) for name, value in attrs if name in ("src", "href", "action", "data", "srcset")]
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def render_page(one: Incident, json_name: str) -> str:
    return page_text(incident_page(one, json_name))


def checked(text: str) -> Page:
    """Parse a page; it refers to nothing outside itself."""
    page = Page(text)
    assert page.references == []
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    style = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)[0]
    assert "url(" not in style
    assert "@import" not in style
    assert "prefers-color-scheme: dark" in style
    return page


def places(dims: ParallelDims, hosts: list[str] | None = None) -> tuple[RankPlace, ...]:
    """All ranks of a layout, eight a host unless hosts are given."""
    found = []
    for rank in range(dims.world_size):
        one = replace(dims, rank=rank)
        host = hosts[rank] if hosts else f"node{rank // 8:03d}"
        found.append(RankPlace(rank, host, "H200", one.dp_rank, one.pp_rank, one.tp_rank))
    return tuple(found)


def flag(place: RankPlace, fqn: str, phase: str = FORWARD, **changes: Any) -> FlaggedRank:
    """A flagged rank that was wrong in all repeats."""
    options = {"verdict": "persistent", "repeats": 5, "wrong_repeats": 5, "rate_bound": None, **changes}
    first = Address(120, 0, phase, fqn, "output")
    return FlaggedRank(**vars(place), first=first, expected="00" * 8, got="5eedfacecafef00d", **options)


def incident(run_dir: Path | str = "runs/my", **changes: Any) -> Incident:
    """One of three replicas computed a wrong QKV, once and again."""
    ranks = places(ParallelDims(1, 1, 3), ["alpha", "beta", "gamma"])
    values: dict[str, Any] = {
        "time": "2026-03-01T02:03:04+00:00",
        "run_dir": str(run_dir),
        "step": 120,
        "micro_batch": 0,
        "tier": "audit",
        "verdict": "persistent",
        "basis": "relative to the majority",
        "policy": "halt",
        "done": "halted",
        "flagged": (flag(ranks[1], SUBMODULES[1]),),
        "disputed": (),
        "ranks": ranks,
        "evidence": IncidentEvidence(
            1234,
            {
                FORWARD: {SUBMODULES[1]: {1: 1}, SUBMODULES[2]: {1: 2}, SUBMODULES[3]: {1: 2}},
                BACKWARD: {name: {1: 4} for name in reversed(SUBMODULES)},
                WEIGHT_GRAD: {SUBMODULES[2]: {1: 1}},
            },
        ),
        "environment": Environment({"torch": "2.13.0"}, {"tensor": 1, "pipeline": 1, "data": 3}, "bf16"),
        "earlier": (Event(1.7e9, 1, "beta", 70, 0, "finding", "recompute", {"submodule": SUBMODULES[1]}),),
        "golden": "/goldens/my.golden",
        "verified_checkpoint": "runs/my/checkpoints/step_00000100",
        "newest_candidate": "runs/my/checkpoints/step_00000110",
        **changes,
    }
    return Incident(**values)


def test_an_incident_comes_back_from_json() -> None:
    """Everything survives, what to do is in the file too, and a damaged file is named with the part that is wrong."""
    for one in (incident(), incident(micro_batch=None, golden=None, earlier=(), verdict="intermittent")):
        text = incident_to_json(one)
        assert incident_from_json(text) == one
        assert len(json.loads(text)["what_to_do"]) == 3
    content = json.loads(incident_to_json(incident()))
    assert content["flagged"][0]["host"] == "beta"
    assert content["flagged"][0]["first"]["fqn"] == SUBMODULES[1]
    with pytest.raises(TraceError, match=r"x\.json.*verdict"):
        incident_from_json(json.dumps({**content, "verdict": "guilty"}), "x.json")
    with pytest.raises(TraceError, match="damaged"):
        incident_from_json(incident_to_json(incident())[:-50])
    with pytest.raises(ValueError, match="neither flagged nor disputed"):
        incident(flagged=())


def test_reports_are_written_beside_earlier_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names hold the step, and a number where one is there; a folder that refuses them is told with the incident."""
    first = write_incident(incident(tmp_path))
    second = write_incident(incident(tmp_path))
    assert [path.name for path in (*first, *second)] == [
        "incident_step_00000120.json",
        "incident_step_00000120.html",
        "incident_step_00000120_2.json",
        "incident_step_00000120_2.html",
    ]
    assert incident_from_json(first[0].read_text()) == incident(tmp_path)
    assert "incident_step_00000120_2.json" in second[1].read_text()
    before = sorted(path.name for path in (tmp_path / "reports").iterdir())
    monkeypatch.setattr(os, "fsync", _refuse)
    with pytest.raises(StorageError, match="rank 1 on host beta"):
        write_incident(incident(tmp_path))
    assert sorted(path.name for path in (tmp_path / "reports").iterdir()) == before


def _refuse(descriptor: int) -> None:
    raise OSError(13, "Permission denied")


def test_a_page_says_what_where_when_and_what_to_do_first() -> None:
    """The heading holds step, rank, host, submodule, time and what was done; instructions come before evidence."""
    page = checked(render_page(incident(), "x.json"))
    text = " ".join(page.text.split())
    head = headline(incident())
    assert head in text
    assert head == (
        "Step 120, micro-batch 0: rank 1 on host beta computed a wrong forward of 1.layer.self_attention.linear_qkv "
        "(persistent). Found 2026-03-01T02:03:04+00:00; training was halted."
    )
    order = [text.index(words) for words in (head, "exit code 73", "What to do", "What is known", "Evidence", "1,234")]
    assert order == sorted(order)
    for needed in (
        "5eedfacecafef00d",
        "wrong by the same value in 5 of 5 repeats",
        "majority",
        "torch 2.13.0",
        "finding recompute",
        "x.json",
    ):
        assert needed in text


@pytest.mark.parametrize("basis", ["referee", "own code in fp64"])
def test_a_page_tells_an_estimate_of_rounding_from_a_bound(basis: str) -> None:
    """Of what the referee computed; so does the incident that comes back from JSON."""
    worst = Outside((1, 2), 0.5, 0.001, {0: "0.5", 1: "0.75"})
    opinion = Opinion(Address(7, 0, FORWARD, "m", "output"), {0: True, 1: False}, "", 3, worst, basis)
    found = incident(basis=basis, opinions=(opinion,))
    assert incident_from_json(incident_to_json(found)).opinions == (opinion,)
    text = checked(render_page(found, "x.json")).text
    assert ("rounding is estimated to make a difference of 0.001" in text) == (basis != "referee")
    assert ("rounding explains at most a difference of 0.001" in text) == (basis == "referee")


def test_an_extra_micro_batch_of_an_audit_is_none_of_the_step() -> None:
    """Sentences say so, and no number."""
    place = places(ParallelDims(1, 1, 2))[1]
    address = Address(7, OF_AUDIT, FORWARD, "1.layer", "output")
    assert str(address) == "step 7, the extra micro-batch of the audit, forward of 1.layer (output)"
    settled = Finding("audit", OF_AUDIT, (RankVerdict(place.rank, PERSISTENT, MAJORITY, address),))
    assert "micro-batch 0" not in settled.text and "the extra micro-batch of the audit" in settled.text
    assert headline(incident(micro_batch=OF_AUDIT)).startswith(
        f"Step {incident().step}, the extra micro-batch of the audit: "
    )


def test_instructions_are_commands_that_can_be_run() -> None:
    """Leave out the host, verify it, go on from the verified checkpoint; each by a command with its names in it."""
    commands = [line for step in incident().what_to_do for line in step.commands]
    assert commands == [
        "megasdc launch --hostfile HOSTFILE --exclude beta --config runs/my/resolved.json",
        "deepspeed --hostfile HOSTFILE --exclude beta --module megasdc.entry.pretrain_gpt "
        "--config runs/my/resolved.json",
        "megasdc golden verify /goldens/my.golden --repeats 10",
        "megasdc verify-checkpoint runs/my/checkpoints/step_00000100",
    ]
    assert "step_00000110, will be moved" in incident().what_to_do[2].text
    bare = incident(golden=None, verified_checkpoint=None).what_to_do
    assert bare[1].commands[0].startswith("megasdc golden record --config runs/my/resolved.json")
    assert "--set megasdc.checkpoint.require_verified=never" in bare[2].commands
    assert "exit code 72" in bare[2].text
    fresh = incident(verified_checkpoint=None, newest_candidate=None).what_to_do[2]
    assert (fresh.text, fresh.commands) == ("There is no checkpoint: the launch starts from step 1.", ())
    on = incident(done="repaired", policy="repair", verdict="not_reproduced").what_to_do
    assert "may stay in use" in on[0].text
    assert "next start" in on[0].text
    assert on[2].text == "The run continues; no restart is needed."
    alone = incident(ranks=(incident().ranks[1],)).what_to_do[0]
    assert "No host of the run would be left" in alone.text
    assert not any("--exclude" in command for command in alone.commands)


def test_faults_that_were_armed_are_not_injected_again() -> None:
    """The page says that they were on purpose, and both commands to start empty the fields they came from."""
    one = incident(injected=("megasdc.faults", "megasdc.process_faults"))
    start = one.what_to_do[0]
    assert start.text.startswith("Faults were injected on purpose in this run (megasdc.faults, megasdc.process_faults)")
    assert len(start.commands) == 2
    for command in start.commands:
        assert command.endswith(
            "--config runs/my/resolved.json --set 'megasdc.faults=[]' --set 'megasdc.process_faults=[]'"
        )
    head = checked(render_page(one, "x.json")).text.partition("What to do")[0]
    assert "Faults were injected on purpose in this run." in head
    assert incident_from_json(incident_to_json(one)) == one
    assert "on purpose" not in render_page(incident(), "x.json")


def test_commands_parse_as_the_commands_they_are() -> None:
    """Each `megasdc` command line of a report names an existing command with existing options."""
    from typer.main import get_command

    from megasdc.cli import app

    for one in (incident(), incident(golden=None), incident(run_dir="a run's folder", injected=("megasdc.faults",))):
        lines = [line for step in one.what_to_do for line in step.commands if line.startswith("megasdc ")]
        assert lines
        for line in lines:
            command, words = get_command(app), shlex.split(line)[1:]
            while hasattr(command, "commands"):
                command = command.commands[words.pop(0)]
            command.make_context("x", words)


@pytest.mark.parametrize(
    ("verdict", "wrong", "text"),
    [
        ("persistent", 5, "wrong by the same value in 5 of 5 repeats"),
        ("intermittent", 5, "wrong in 5 of 5 repeats, not always by the same value"),
        ("intermittent", 2, "wrong in 2 of 5 repeats"),
        ("intermittent", 0, "wrong in 0 of 5 repeats, but not only here, or its values vary"),
        ("not_reproduced", 0, "wrong in 0 of 5 repeats"),
    ],
)
def test_repeats_say_what_tells_the_verdicts_apart(verdict: str, wrong: int, text: str) -> None:
    """Wrong in all repeats is persistent or intermittent: the clause says whether the values were equal."""
    assert how_often(verdict, wrong, 5) == text
    assert how_often(verdict, wrong, 0) == ""


def test_two_flagged_ranks_are_both_named() -> None:
    """Each has its line, its address and its command; the origin of each is marked once."""
    ranks = incident().ranks
    second = flag(ranks[2], SUBMODULES[3], BACKWARD, verdict="not_reproduced", wrong_repeats=0, rate_bound=0.4507)
    one = incident(
        flagged=(flag(ranks[1], SUBMODULES[1]), second),
        evidence=IncidentEvidence(9, {FORWARD: {SUBMODULES[1]: {1: 1}}, BACKWARD: {SUBMODULES[3]: {1: 1, 2: 1}}}),
    )
    html = render_page(one, "x.json")
    text = checked(html).text
    assert "rank 1 on host beta" in headline(one)
    assert "rank 2 on host gamma" in headline(one)
    assert "--exclude beta@gamma" in text
    assert "at most 45.1% of its micro-batches" in text
    assert len(re.findall(r'class="[^"]*s4 origin"', html)) == 2
    assert "Forward (" in text
    assert "Backward (" in text


def test_a_dispute_names_nobody() -> None:
    """Of two replicas that differ both are shown and are to be verified; none is called wrong."""
    ranks = places(ParallelDims(1, 1, 2), ["alpha", "beta"])
    first = Address(120, 0, RECOMPUTE, SUBMODULES[2], "output")
    one = incident(
        ranks=(*ranks, RankPlace(2, "spare", "H200", 2, 0, 0)),
        verdict="inconclusive",
        flagged=(),
        disputed=tuple(DisputedRank(**vars(place), first=first, got=f"{place.rank:016x}") for place in ranks),
        evidence=IncidentEvidence(10, {RECOMPUTE: {SUBMODULES[2]: {0: 1, 1: 1}}}),
    )
    html = render_page(one, "x.json")
    text = checked(html).text
    assert "not known which is wrong" in headline(one)
    assert "computed a wrong" not in text
    assert "Inconclusive" in text
    assert "--exclude alpha@beta" in text
    assert f"{1:016x}" in text
    assert re.search(r'class="[^"]*s4 origin"', html), "both ranks share a column, which is marked"


@pytest.mark.parametrize(
    ("fate", "outcome"),
    [
        ("not taken", "halted before the step was taken"),
        ("taken", "halted once the step was taken"),
        ("skipped", "that the optimizer has skipped, so that no parameter changed"),
        (None, "nothing more was committed"),
    ],
)
def test_a_page_of_a_guard_says_what_became_of_the_step(fate: StepFate | None, outcome: str) -> None:
    """And never tells of more than happened; a sum of a step that was skipped is in no checkpoint."""
    one = incident(tier="reduction", script=Script("train.py", 1, fate), verified_checkpoint=None)
    text = checked(render_page(one, "x.json")).text
    assert outcome in text and ("nothing more was committed" in text) == (fate is None)
    assert (f"Go on from {one.newest_candidate}, the newest checkpoint" in text) == (fate == "skipped")
    assert "at most 0 steps" not in text and ("Begin anew" in text) == (fate != "skipped")
    text = render_page(replace(one, newest_candidate=None), "x.json")
    assert ("or go on from a checkpoint before step 120" in text) == (fate != "skipped")
    assert ("Go on from the newest checkpoint: no parameter has changed" in text) == (fate == "skipped")


@pytest.mark.parametrize(
    ("tier", "what", "outcome"),
    [
        ("state", "holds a wrong state of fc1", "What had changed was put back"),
        ("update", "computed a wrong update of fc1", "The update was computed again"),
        ("audit", "computed a wrong update of fc1", "The work was redone"),
    ],
)
def test_a_page_of_a_repair_says_what_was_put_right(tier: str, what: str, outcome: str) -> None:
    """State that changed was neither computed nor redone, and what was never repeated was not right in repeats."""
    place = incident().ranks[1]
    first = Address(120, None, UPDATE, "fc1", "weight.exp_avg")
    rank = replace(flag(place, "fc1", verdict="not_reproduced", repeats=0, wrong_repeats=0), first=first)
    one = incident(
        tier=tier, verdict="not_reproduced", basis="own copy", policy="repair", done="repaired", micro_batch=None
    )
    one = replace(one, flagged=(rank,), evidence=IncidentEvidence(3, {}))
    text = checked(render_page(one, "x.json")).text
    assert what in headline(one) and outcome in text
    assert ("redone" in text) == (tier == "audit") and ("state of fc1 (weight.exp_avg)" in text) == (tier == "state")
    assert "every result was right" not in text and "found once" in text and "0 differ" not in text


def test_a_page_of_a_wrong_sum_names_its_owner_and_why_not_alone() -> None:
    """Its numbers are the referee's; the ranks are suspects together, and are not said to have computed it each."""
    ranks = places(ParallelDims(1, 1, 3), ["alpha", "beta", "gamma"])
    first = Address(21, None, REDUCED_GRAD, "fc1", "weight")
    opinion = Opinion(first, {1: False}, "", 9930, Outside((0, 8612), 0.0026, 6.25e-10, {1: "0.0039"}))
    one = incident(
        tier="reduction",
        verdict="inconclusive",
        basis="mean of the replicas' gradients",
        flagged=(),
        disputed=tuple(DisputedRank(**vars(place), first=first, got=None) for place in ranks),
        opinions=(opinion,),
        evidence=IncidentEvidence(3, {}),
    )
    text = checked(render_page(one, "x.json")).text
    assert "over ranks 0-2 is wrong; rank 1 on host beta owns it" in headline(one)
    assert "Rank 1 owns the sum and is not named alone, since no other rank has a right copy" in text
    assert "9,930 elements that differ were computed in fp64" in text and "0 differ" not in text
    assert "column 8612, rounding explains at most a difference of 6.25e-10" in text
    assert "computed different results" not in text and "these ranks disagree" not in text


@pytest.mark.parametrize("finite", [True, False])
def test_a_page_of_a_round_has_the_numbers_that_were_looked_at(finite: bool) -> None:
    """Replica, round, why, its norm beside the others' and its own of before; what was done; it comes back as JSON."""
    look = RoundLook(finite, True, 3104.2, {0: 0.5, 2: 0.75}, 8, 3.4, 1.8, 5, {0: 5, 2: 3})
    found = RoundEvidence(1, 10, "the norm is 3104" if finite else "its weights are not finite", look)
    place = places(ParallelDims(1, 1, 1), ["alpha"])
    disputed = DisputedRank(**vars(place[0]), first=Address(50, None, "update", "the whole model", ""), got=None)
    changes = {"tier": "round", "basis": "rounds of all replicas", "policy": "leave out", "done": "left out"}
    one = incident(
        **{**changes, "verdict": "inconclusive", "micro_batch": None, "step": 50, "round": found},
        flagged=(),
        disputed=(disputed,),
        ranks=place,
        evidence=IncidentEvidence(0, {}),
    )
    assert incident_from_json(incident_to_json(one)) == one and not one.ends_start
    text = checked(render_page(one, "a.json")).text
    assert f"round 10 was made without replica 1 (rank 0 on host alpha): {found.reason}" in headline(one)
    for told in (
        "3104.2",
        "median 0.625 of 2, from 0.5 to 0.75",
        "its last 8 rounds: mean 3.4",
        "other replicas: 3, 5",
        "have begun anew",
    ):
        assert told in text
    assert ("NaN or Inf" in text) is not finite and "policy" not in text and "no restart is needed" in text


def test_hostile_names_are_text() -> None:
    """Markup and quotes in any name are shown as they are, and quoted for the shell in commands."""
    evil = "<script>alert('1')</script>\"&' onload=x"
    place = RankPlace(0, evil, evil, 0, 0, 0)
    one = incident(
        run_dir=f"runs/{evil}",
        ranks=(place, RankPlace(1, "other", evil, 1, 0, 0)),
        flagged=(flag(place, evil),),
        golden=f"/{evil}",
        evidence=IncidentEvidence(1, {FORWARD: {evil: {0: 1}}}),
        environment=Environment({evil: evil}, {"tensor": 1}, "bf16"),
        earlier=(Event(0.0, 0, evil, None, None, evil, evil, {evil: evil}),),
    )
    html = render_page(one, evil)
    assert "<script" not in html
    assert evil in checked(html).text
    assert shlex.quote(evil) in checked(html).text
    assert incident_from_json(incident_to_json(one)) == one


def _fleet(differs: Any) -> Incident:
    """512 ranks and 400 submodules; ``differs`` says how many results of (submodule, rank) differ."""
    ranks = places(ParallelDims(8, 4, 16))
    names = [f"{layer}.layer.self_attention.linear_{part}" for layer in range(100) for part in ("a", "b", "c", "d")]
    maps = {
        phase: {
            name: {rank: count for rank in range(512) if (count := differs(place, rank))}
            for place, name in enumerate(names)
        }
        for phase in (FORWARD, RECOMPUTE, BACKWARD, WEIGHT_GRAD)
    }
    flagged = flag(ranks[131], names[7])
    return incident(ranks=ranks, flagged=(flagged,), evidence=IncidentEvidence(10**6, maps))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["a replica", "everything", "at random"])
def test_a_page_of_a_fleet_stays_small(kind: str) -> None:
    """512 ranks x 400 submodules: below 3 MB, equal rows and columns as one, what is left out said, origin shown."""
    draw = random.Random(1)
    bad = {rank for rank in range(512) if rank // 8 % 16 == 0}
    one = _fleet(
        {
            "a replica": lambda place, rank: int(rank in bad and place >= 7),
            "everything": lambda place, rank: 2,
            "at random": lambda place, rank: draw.randrange(4) + (rank == 131),
        }[kind]
    )
    html = render_page(one, "x.json")
    text = checked(html).text
    assert len(html.encode()) < 3_000_000
    assert one.flagged[0].host in text
    assert one.flagged[0].first.fqn in text
    maps = build_heat_maps(one)
    assert [len(found.rows) <= MAX_ROWS and len(found.headings) <= 1 + MAX_COLUMNS for found in maps] == [True, True]
    if kind == "a replica":
        assert maps[1].headings == ("submodule", "0-7, 128-135, 256-263, 384-391", ranges(set(range(512)) - bad))
        assert [row[0].text for row in maps[1].rows] == [
            "1.layer.self_attention.linear_d to 99.layer.self_attention.linear_d (393)"
        ]
        assert maps[1].note == ""
    if kind == "at random":
        assert re.search(r"\d+ more ranks", text)
        assert re.search(r"200 more rows", text)
    if kind != "everything":
        assert sum("origin" in cell.look for row in maps[0].rows for cell in row) == 1


def test_heat_maps_merge_only_what_is_equal() -> None:
    """Neighbouring equal rows and equal columns are one; shades are shares of the largest; an origin stands alone."""
    found = build_heat_maps(incident())
    assert [found_map.title.split()[0] for found_map in found] == ["Forward", "Backward"]
    forward = found[0]
    assert forward.headings == ("submodule", "0, 2", "1")
    assert [(row[0].text, row[2].text, row[2].look) for row in forward.rows] == [
        (SUBMODULES[1], "1", "s2 origin"),
        (f"{SUBMODULES[2]} to {SUBMODULES[3]} (2)", "2", "s4"),
    ]
    assert {(row[1].text, row[1].look) for row in forward.rows} == {("", "")}
    counts = {"a": {1: 1}, "b": {1: 4}, "c": {1: 5}, "d": {1: 8}, "e": {1: 2}}
    shades = build_heat_maps(incident(evidence=IncidentEvidence(1, {FORWARD: counts})))[0]
    assert [row[2].look for row in shades.rows] == ["s1", "s2", "s3", "s4", "s1"]
    assert build_heat_maps(incident(evidence=IncidentEvidence(1, {}))) == []
    for rows in (MAX_ROWS, MAX_ROWS + 1):
        counts = {f"s{row}": {1: 1 + row % 2} for row in range(rows)}
        (full,) = build_heat_maps(incident(evidence=IncidentEvidence(1, {FORWARD: counts})))
        assert len(full.rows) == MAX_ROWS
        assert full.note == ("" if rows == MAX_ROWS else "1 more rows, of later results, are not shown.")
    assert ranges([5, 3, 0, 1, 2, 9]) == "0-3, 5, 9"


def test_an_undecided_case_says_what_would_decide_it() -> None:
    """A third replica only where there are two; another check; a golden trace. A decided one says nothing of that."""
    ranks = places(ParallelDims(1, 1, 2), ["alpha", "beta"])
    disputed = tuple(DisputedRank(**vars(one), first=Address(1, 0, FORWARD, "a", "output"), got="00") for one in ranks)
    two = Environment({"torch": "2.13.0"}, {"tensor": 1, "pipeline": 1, "data": 2}, "bf16")
    undecided = {"verdict": "inconclusive", "flagged": (), "disputed": disputed, "ranks": ranks, "environment": two}
    told = checked(render_page(incident(**undecided), "x.json")).text
    for what in ("a third replica", "megasdc.audit.permuted true", "megasdc.sdc.golden", "golden record --config"):
        assert what in told
    script = Script("deepspeed train.py", 3, "not taken")
    of_guard = checked(render_page(incident(**undecided, script=script), "x.json")).text
    assert "golden.record true" in of_guard and " audit.permuted true" in of_guard
    of_three = incident(**{**undecided, "environment": incident().environment})
    assert "a third replica" not in checked(render_page(of_three, "x.json")).text
    assert "would decide" not in render_page(incident(), "x.json")


def test_earlier_events_of_other_starts_are_told_apart() -> None:
    """Each has the number of its start, and a line says that there are others."""
    event = incident().earlier[0]
    earlier = (replace(event, attempt=1), replace(event, attempt=2))
    told = checked(render_page(incident(attempt=2, earlier=earlier), "x.json")).text
    assert "2 (this one)" in told and "Some are of earlier starts" in told
    assert "Some are of" not in checked(render_page(incident(attempt=2, earlier=earlier[1:]), "x.json")).text
