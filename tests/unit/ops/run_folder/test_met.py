"""A run that ended well says what it met: incidents, standstills, replaced hosts, steps back; everywhere the same."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from run_folder import add_hang, add_incident, losses, write_run

from megasdc.lab.report.run_pages.run_page import run_page
from megasdc.ops.launch.launch_verdict import SHOWN, Met, lines_of, read_met
from megasdc.ops.run_folder.record import load_run
from megasdc.ops.run_folder.summary import render, summarize_run
from megasdc.ops.supervise.allocation import Allocation
from megasdc.ops.supervise.journal import FOLDER, Journal, JournalEntry
from megasdc.ops.supervise.launch_backend import LaunchBackend
from megasdc.ops.supervise.met import all_met, by_entry, entry_name, of_journal
from megasdc.ops.top.screen import Screen
from megasdc.ops.top.view import RunWatcher

DIAGNOSIS = {"kind": "host_lost", "text": "n2 is lost", "hosts": ["n2"], "step": 30, "back": None}


@pytest.fixture(name="run")
def _run(tmp_path: Path) -> Path:
    """A supervised run of 60 steps that is done: a repaired step, a standstill, a lost host, a way back."""
    run: Path = write_run(tmp_path / "run", losses(60))
    add_incident(run, 12)
    add_hang(run, 20)
    with Journal(run / FOLDER, lambda line: None) as journal:
        journal.write("hosts", slots={"n1": 1, "n2": 1, "n3": 1}, num_hosts=2, sizes=[2])
        journal.write("opened", config="c.json")
        for number, (replaced, back) in enumerate(
            [(["n2"], None), ([], {"at_most": 25, "skip": [40, 44]}), ([], None)], 1
        ):
            journal.write("planned", attempt=number, slots={"n1": 1}, launch_id=f"launch{number}")
            journal.write("started", pid=1, ticks=1)
            journal.write("ended", exit_code=78, diagnosis=DIAGNOSIS, trained=None, last=None)
            text = f"decision {number}"
            journal.write("decided", action="start again", text=text, replaced=replaced, pause_s=0.0, back=back)
            journal.write("tested", host="n2", exit_code=0 if number == 2 else 1, text="tested")
        journal.write("finished", exit_code=0, text="done")
    return run


def test_everything_is_in_one_list(run: Path) -> None:
    """Hosts, ranks, what was done and what to do."""
    found = all_met(run)
    assert [one.kind for one in found] == ["corruption", "standstill", "replaced", "rewound", "returned", "replaced"]
    wrong, hang, lost, back, again, spare = found
    assert (wrong.hosts, wrong.ranks, wrong.devices, wrong.verdict) == (("node7",), (1,), ("cpu",), "persistent")
    assert wrong.place == "forward of 2.layer.mlp.linear_fc1" and wrong.done == "the step was repaired"
    assert "drain node7" in wrong.to_do and wrong.page is not None and Path(wrong.page).exists()
    assert hang.ranks == (1,) and hang.hosts and hang.step == 20
    assert lost.hosts == ("n2",) and lost.done == "decision 1" and "drain n2" in lost.to_do
    assert "step 25 at most" in back.done and "40" in back.done
    assert again.hosts == ("n2",), "only what was away comes back, and only once"
    assert (spare.attempt, spare.hosts, spare.done) == (3, ("n2",), "it is not used as a spare")
    assert spare.what == "n2 was tested: tested" and "drain n2" in spare.to_do


def test_a_way_back_that_nobody_is_named_for_is_in_the_list(run: Path) -> None:
    """As where the last save of a run was wrong, without a report on a rank; once, and not where the run ends so."""
    with Journal(run / FOLDER, lambda line: None) as journal:
        for number, action in ((4, "start again"), (5, "stop")):
            journal.write("planned", attempt=number, slots={"n1": 1}, launch_id=f"launch{number}")
            journal.write("ended", exit_code=73, diagnosis={**DIAGNOSIS, "kind": "corrupt"}, trained=None, last=None)
            journal.write("decided", action=action, text="the last save is wrong", replaced=[], pause_s=0.0, back=None)
    (last,) = [one for one in all_met(run) if one.what == "the last save is wrong"]
    assert (last.kind, last.attempt, last.hosts) == ("rewound", 4, ()) and "earlier save" in last.done


def test_it_stands_wherever_people_look(run: Path) -> None:
    """Summary, page, live view and JSON of a run whose steps are all done."""
    summary, found = summarize_run(run), all_met(run)
    assert summary.failure is None and summary.finished and list(summary.met) == found
    text = render(summary)
    assert all(str(one) in text for one in found)
    page = run_page(load_run(run), run / "page.html", 0.0)
    (table,) = next(one for one in page.sections if one.heading == "What the run met").tables
    assert len(table.rows) == len(found)
    view = RunWatcher(run).read()
    assert [one["kind"] for one in view.as_dict()["met"]] == [one.kind for one in found]
    console = Console(width=400, record=True, file=open("/dev/null", "w"))  # noqa: SIM115 - as long as the console
    console.print(Screen(view))
    assert "n2 was tested: tested; it is not used as a spare" in console.export_text()


def test_a_clean_run_says_nothing(tmp_path: Path) -> None:
    """No heading, no line."""
    run: Path = write_run(tmp_path / "run", losses(20))
    assert all_met(run) == [] and lines_of([]) == []
    assert "met  " not in render(summarize_run(run))


def test_a_launch_tells_its_own(run: Path) -> None:
    """By the id of the launch; a long list by its last ones."""
    assert read_met(run, lambda launch: launch == "another") == []
    many = [Met(1, step, "", "standstill", "a", ()) for step in range(SHOWN + 3)]
    assert (
        lines_of(many)[0] == f"the run met {SHOWN + 3} faults, the last {SHOWN}:" and len(lines_of(many)) == SHOWN + 1
    )


def test_decisions_alert_once(tmp_path: Path) -> None:
    """The user's program gets them as JSON; a supervisor that follows the decision again does not repeat it."""
    got = tmp_path / "got"
    command = [sys.executable, "-c", f"import sys; open({str(got)!r}, 'a').write(sys.stdin.read())"]
    (tmp_path / FOLDER).mkdir()
    nothing: object = None
    engine = LaunchBackend(tmp_path, 1, [], 0, nothing, Allocation("hosts", {}), {}, command)  # type: ignore[arg-type]
    some = [Met(1, 5, "", "replaced", "n2: lost", ("n2",))]
    assert engine.alert("decision_0001_a", []) == "" and not got.exists()
    assert engine.alert("decision_0001_b", some) == "" == engine.alert("decision_0001_b", some)
    assert [one["hosts"] for one in json.loads(got.read_text())] == [["n2"]]
    got.unlink()
    (tmp_path / FOLDER / "decision_0002_c.json").mkdir()
    assert "cannot be written" in engine.alert("decision_0002_c", some) and got.exists(), "it is told nevertheless"


def test_a_decision_is_known_in_a_journal_that_is_written_anew(tmp_path: Path) -> None:
    """Its entry gets another number: whoever was told of it would be again, or not of what has its number now."""
    found = list[str]()
    with Journal(tmp_path, lambda line: None) as journal:
        journal.write("hosts", slots={"n1": 1, "n2": 1}, num_hosts=1)
        journal.write("opened", config="c.json")
        journal.write("planned", attempt=1, slots={"n1": 1}, launch_id="launch1")
        journal.write("ended", exit_code=78, diagnosis=DIAGNOSIS, trained=None, last=None)
        journal.write("decided", action="start again", text="text", replaced=["n2"], pause_s=0.0, back=None)
        journal.write("tested", host="n2", exit_code=0, text="passed")
        for entries in (journal.entries, [journal.entries[0], *journal.entries[2:]]):
            renumbered = [replace(one, number=at) for at, one in enumerate(entries, 1)]
            found += [entry_name(entry, some) for entry, some in by_entry(renumbered) if some]
    assert found[:2] == found[2:] and found[0] == "decision_0001_launch1" and found[1].startswith("tested_")


def test_a_host_that_lacks_nothing_any_more_is_to_be_looked_at() -> None:
    """There is nothing to mend that a check finds."""
    ended = JournalEntry(1, 0.0, "ended", {"diagnosis": {**DIAGNOSIS, "kind": "mended"}})
    (found,) = of_journal([ended, JournalEntry(2, 0.0, "decided", {"action": "", "text": "t", "replaced": ["n2"]})])
    assert found.to_do == "look at n2, test with `megasdc stress`"
