"""Does a launch end with a verdict of every rank, whatever is wrong on one host? Launched ranks without a launcher."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import StartedCommand, fork_fresh_ranks

from megasdc.config.load import parse_config
from megasdc.ops.golden.node import Collector, StoreMailbox
from megasdc.ops.golden.record import record_golden_trace
from megasdc.ops.golden.watched_ranks import RankReport
from megasdc.parallel.local_ranks import free_port
from megasdc.sdc.golden import Golden, load_golden, save_golden

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(280)]

SCRIPT = Path(__file__).resolve().parents[2] / "launch" / "golden_verify.py"


def _record(file: Path, replicas: int) -> Path:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "megasdc": {
            "model": {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "max_positions": 64},
            "data": {"path": "none", "sequence_length": 16},
            "protect": "off",
            "training": {"steps": 5},
            "golden": {"vocab_size": 100, "steps": 1, "micro_batches": 1},
            "logging": {"run_dir": str(file.parent / "run")},
        },
    }
    with pytest.MonkeyPatch.context() as patch:
        fork_fresh_ranks(patch.setattr)
        record_golden_trace(parse_config(config), file, replicas=replicas, repeats=1)
    return file


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A golden trace of one rank, in a folder of its own."""
    return _record(tmp_path_factory.mktemp("single") / "one.golden", 1)


@pytest.fixture(scope="module")
def double(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A golden trace of two replicas, in a folder of its own."""
    return _record(tmp_path_factory.mktemp("double") / "two.golden", 2)


def _launch(*of_ranks: list[str]) -> list[tuple[int, str, str]]:
    """Exit code, standard output and error of each rank, given its own arguments as if it were on its own host."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    commands = [
        StartedCommand(
            str(SCRIPT),
            [*arguments, "--repeats", "1", "--json", f"--local_rank={rank}"],
            {**common, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(len(of_ranks))},
            forked_ranks=True,
        )
        for rank, arguments in enumerate(of_ranks)
    ]
    ended = [command.wait(250) for command in commands]
    return [(one.returncode, one.stdout, one.stderr) for one in ended]


def _ranks(ended: list[tuple[int, str, str]], code: int) -> list[dict[str, Any]]:
    assert [one[0] for one in ended] == [code] * len(ended), ended
    return json.loads(ended[0][1])["ranks"]  # type: ignore[no-any-return]


def test_a_host_without_a_file_is_a_result(single: Path, tmp_path: Path) -> None:
    """Its rank is not comparable at once, and why; the other host is verified; both end with that exit code."""
    broken = tmp_path / "library"
    broken.mkdir()
    (broken / "x.golden").write_text("no golden trace")
    first, second = _ranks(_launch(["--library", str(single.parent)], ["--library", str(broken)]), 80)
    assert (first["status"], first["runs"]) == ("healthy", 1)
    assert second["status"] == "not comparable" and "x.golden is damaged" in second["detail"]


def test_hosts_agree_on_the_size_of_a_cell(single: Path, double: Path) -> None:
    """A host that has a trace of more ranks only does not cut the ranks otherwise than rank 0 does."""
    first, second = _ranks(_launch([str(single)], ["--library", str(double.parent)]), 80)
    assert [(first["cell"], first["status"]), (second["cell"], second["status"])] == [
        (0, "healthy"),
        (1, "not comparable"),
    ]
    assert "two.golden: is of layout" in second["detail"]


def test_a_cell_needs_one_file(double: Path, tmp_path: Path) -> None:
    """Two hosts of one cell with files of different recordings accuse nobody; each says whose file is another."""
    other = tmp_path / "two.golden"
    save_golden(other, Golden(**{**vars(load_golden(double)), "recorded": {"host": "another"}}))
    ranks = _ranks(_launch([str(double)], [str(other)]), 80)
    assert [rank["status"] for rank in ranks] == ["not comparable"] * 2
    assert all("has another golden file" in rank["detail"] for rank in ranks)


def test_rank_0_reads_the_drill_for_all(single: Path, tmp_path: Path) -> None:
    """A drill that lies on the first host alone harms the ranks that it names; the others are healthy."""
    drill = tmp_path / "faults.json"
    drill.write_text(json.dumps({"faults": [{"submodule": "2.layer.mlp.linear_fc1"}], "process_faults": []}))
    ranks = _ranks(_launch([str(single), "--faults", str(drill)], [str(single)]), 73)
    assert [rank["status"] for rank in ranks] == ["divergent"] * 2


def test_what_rank_0_refuses_ends_all(single: Path, double: Path, tmp_path: Path) -> None:
    """A wrong drill, or a number of ranks that does not fit: every rank ends at once, with that exit code."""
    drill = tmp_path / "faults.json"
    drill.write_text(json.dumps({"faults": [{"kind": "value"}]}))
    ended = _launch([str(single), "--faults", str(drill)], [str(single)])
    assert [code for code, _, _ in ended] == [70, 70]
    assert all("faults.0.value: kind value needs it" in error for _, _, error in ended)
    [(code, _, error)] = _launch([str(double)])
    assert code == 70 and "got 1 rank, no multiple of the 2" in error


def test_an_unwritable_result_is_printed(single: Path, tmp_path: Path) -> None:
    """Rank 0 prints before it writes, and ends with the code for storage."""
    (tmp_path / "file").touch()
    [(code, said, error)] = _launch([str(single), "--out", str(tmp_path / "file" / "x.json")])
    assert code == 77 and "x.json cannot be written" in error
    assert json.loads(said)["counts"] == {"healthy": 1}


def test_rank_0_sees_how_far_all_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of ranks that still work count as soon as they are told, those of a report when it is there."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    told: list[int] = []
    board = StoreMailbox(0, 3)
    collector = Collector(board, 1, told.append)
    board.write("alive/1", [1.0, 4])
    collector.poll()
    board.send_heartbeat(2)
    board.write("report/1", vars(RankReport("b", 1, 1, 0, "done", runs=[{}] * 5)))
    collector.poll()
    assert told == [4, 7]


def test_wrong_values_are_refused_as_by_the_command() -> None:
    """What `megasdc golden verify` refuses on its command line, the launched script does too."""
    for option in (["--repeats", "0"], ["--timeout", "1"], ["--minutes", "-1"]):
        for command in ([str(SCRIPT), "x.golden"], ["-m", "megasdc", "golden", "verify", "x.golden"]):
            done = subprocess.run([sys.executable, *command, *option], capture_output=True, text=True, check=False)
            assert done.returncode == 2 and option[0] in done.stderr
