"""Commands of README and docs: their options exist, the tutorials run in every test run, all behind ``--all``."""

from __future__ import annotations

import ast
import itertools
import json
import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import pytest
import typer.main
from harness import forked_programs

from megasdc.cli import app, compare
from megasdc.common.errors import ERRORS_BY_EXIT_CODE, ExcludedNodeError
from megasdc.ops.cluster import unavailable_reason
from tools.bench import commands as bench_command

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
GUIDES = (
    *(
        "data",
        "models",
        "memory",
        "checkpoints",
        "snapshots",
        "archive",
        "resume",
        "determinism",
        "hugging-face",
        "compare",
    ),
    *("traces", "triage", "golden", "stress", "protect", "detection", "audits"),
    *("dropcompute", "gradient-bounds", "launching"),
    *("fault-injection", "health", "stragglers", "devices", "links", "studies", "sweeps", "reports", "metrics", "gpu"),
    "isolation",
    "local-sgd",
    "attach",
    "run",
    "supervise",
    "preflight",
    "plan-run",
    "security",
    "kubernetes",
    "install",
)
"""In an order in which a page uses only what those before it make."""
TOOLS = {
    "tools/compare_checkpoints.py": compare.checkpoints_script,
    "tools/compare_traces.py": compare.traces_script,
    "tools.bench": bench_command.app,
}
BENCH = ["python", "-m", "tools.bench"]
pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(2400)]

HOSTS, DROPS = "tests/end_to_end", "tests/distributed/test_bench_dropcompute.py"
DIGESTS = "tests/unit/lab/checkpoints/test_digests.py"
TRAVEL = f"{DIGESTS}::test_blocks_that_travel_give_the_answer_of_elements"
RUN_ELSEWHERE = {
    "bash launch/quickstart.sh": ".ci/run",
    "bash tests/run.sh": ".ci/run",
    "bash tests/gpu.sh --make-wheels": "tests/unit/test_gpu_script.py::test_the_wheels_are_the_tested_versions",
    "bash tests/gpu.sh --wheels": f"{HOSTS}/test_gpu_on_cpu.py::test_parts_run_on_a_processor",
    "megasdc launch --hostfile hosts --config my.json --dry-run": (
        f"{HOSTS}/test_launch.py::test_dry_run_checks_and_starts_nothing"
    ),
    "megasdc launch --hostfile": f"{HOSTS}/test_launch.py::test_success_needs_and_finds_every_record",
    "megasdc supervise --hostfile": f"{HOSTS}/test_supervise.py::test_lost_hosts_are_replaced_and_the_run_ends",
    "megasdc plan-run --run": "tests/unit/lab/planning/test_run_plan.py::test_figures_of_a_run",
    "megasdc preflight --hostfile": f"{HOSTS}/test_preflight.py::test_a_spare_is_off_and_storage_is_small",
    "launch/compare_nodes.sh": f"{HOSTS}/test_compare_nodes.py::test_the_odd_host_is_named_and_a_dead_one_too",
    "deepspeed --hostfile hosts launch/golden_verify.py": f"{HOSTS}/test_golden_launch.py::test_two_hosts_are_healthy",
    "megasdc stress --hostfile hosts --minutes": f"{HOSTS}/test_stress_hosts.py::test_a_healthy_pair_passes",
    "megasdc stress --hostfile hosts --drill": f"{HOSTS}/test_stress_hosts.py::test_the_harmed_host_is_named",
    "megasdc stress --hostfile hosts --only links": (
        f"{HOSTS}/test_stress_hosts.py::test_a_link_with_a_delay_in_one_direction_is_named"
    ),
    "deepspeed --num_gpus 3 train.py": f"{HOSTS}/test_guard_page.py::test_the_wrong_rank_is_named",
    "megasdc run -- deepspeed --num_gpus 2": (
        f"{HOSTS}/test_user_program.py::test_a_training_ends_as_without_megasdc_and_its_failures_are_named"
    ),
    "megasdc run --protect standard": (
        f"{HOSTS}/test_user_program.py::test_one_word_protects_a_script_that_knows_no_megasdc"
    ),
    "megasdc run --config guard.json": (
        f"{HOSTS}/test_user_program.py::test_a_training_goes_on_by_itself_after_a_lost_host"
    ),
    "megasdc run --supervise": f"{HOSTS}/test_user_program.py::test_a_training_goes_on_by_itself_after_a_lost_host",
    "megasdc check-determinism --config guard.json": (
        f"{HOSTS}/test_user_program.py::test_two_runs_of_a_script_are_compared"
    ),
    "kill -USR2": "tests/distributed/test_detection_runs.py::test_a_signal_asks_for_an_audit",
    "for n in 2 4 8; do python -m tools.bench drop-speedup": f"{DROPS}::test_a_sample_of_the_speedup",
    "python -m tools.bench drop-training": f"{DROPS}::test_a_sample_of_training",
    "python -m tools.bench drop-partial": f"{DROPS}::test_a_sample_of_partial_backward_passes",
    "megasdc report scaling.json": "tests/unit/bench/test_drop_report.py::test_measured_and_trained_are_shown_as_found",
    "megasdc compare node1.manifest": f"{DIGESTS}::test_commands_on_manifests",
    "megasdc compare runs/my/checkpoints/step_00000400 node2.manifest": TRAVEL,
    "megasdc compare blocks/": TRAVEL,
}
"""Commands that need other hosts, hours or files of the reader's own, and the test or the script that runs each."""

WRITTEN_THERE = {"--minutes": "--rounds", "-USR2": "SIGUSR2"}
"""Words of such a command that its test writes otherwise."""

SHORTER = (
    (r"--minutes \d+", "--minutes 0.3"),
    (r"--rounds \d+", "--rounds 1"),
    (r"--local 8", "--local 2"),
    (r"--size cpu$", "--size smoke"),
)
"""What is made shorter where the numbers of a page take hours."""


@dataclass(frozen=True)
class Block:
    """A block of shell commands under a heading of a page."""

    page: str
    heading: str
    line: int
    text: str

    @property
    def commands(self) -> list[str]:
        """One text a command, without comments, optional arguments and texts for files; a loop is one command."""
        text = re.sub(r"<<'(\w+)'.*?\n\1$", "", self.text, flags=re.S | re.M)
        text = re.sub(r"\\\n\s*", "", text)
        text = re.sub(r"\s\[[^\]]*\.\.\.\]", "", text)
        text = re.sub(r"\s+#.*", "", text)
        text = re.sub(r"; do\n\s*(.*)\ndone", r"; do \1; done", text)
        return [line.strip() for line in text.splitlines() if line.strip()]


def read_blocks(page: Path) -> list[Block]:
    """A page's blocks of shell commands, in order."""
    blocks, heading, start = [], "", 0
    name = str(page.relative_to(ROOT))
    lines = page.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        if line.startswith("#") and not start:
            heading = line.strip("# ")
        elif line == "```bash":
            start = number
        elif line == "```" and start:
            blocks.append(Block(name, heading, start, "\n".join(lines[start : number - 1])))
            start = 0
    return blocks


README = ROOT / "README.md"
BLOCKS = [block for page in (README, *sorted(DOCS.rglob("*.md"))) for block in read_blocks(page)]


def elsewhere(command: str) -> str | None:
    """The entry of ``RUN_ELSEWHERE`` that a command belongs to."""
    return next((start for start in RUN_ELSEWHERE if command.startswith(start)), None)


def test_every_option_exists() -> None:
    """Each ``megasdc`` and ``tools`` command of README and docs is one that the command line takes."""
    parsed = 0
    for block in BLOCKS:
        for command in block.commands:
            for words in _invocations(command):
                try:
                    _parse(words)
                except click.UsageError as error:
                    pytest.fail(f"{block.page}, block at line {block.line}: {command}: {error.message}")
                parsed += 1
    assert parsed > 100


def _invocations(command: str) -> Iterator[list[str]]:
    """The words of each ``megasdc`` or ``tools`` call in a command, those of a loop's body too."""
    for part in re.split(r";\s*(?:do\s+)?", command):
        words = shlex.split(part)
        words = [word for word in words if word != "-m"] if words[:2] == ["python", "-m"] else words
        if words[:2] == ["megasdc", "test-hosts"]:
            yield words[1:]
            words = words[words.index("--") + 1 :]
        if words[:1] == ["megasdc"] or (words[:1] == ["python"] and words[1] in TOOLS):
            yield words[1:]


def _parse(words: list[str]) -> None:
    """Raise click's error for a subcommand or an option that does not exist; no callback is called."""
    command = typer.main.get_command(TOOLS.get(words[0], app))
    words = words[1:] if words[0] in TOOLS else words
    while isinstance(command, click.Group):
        _, found, words = command.resolve_command(click.Context(command), words)
        assert found is not None
        command = found
    command.make_parser(click.Context(command)).parse_args(list(words))


@pytest.mark.parametrize(("start", "place"), RUN_ELSEWHERE.items(), ids=list(RUN_ELSEWHERE))
def test_what_runs_elsewhere_does(start: str, place: str) -> None:
    """A page has the command; the test that is named for it passes its subcommand, script and options."""
    commands = [command for block in BLOCKS for command in block.commands if elsewhere(command) == start]
    assert commands
    file, _, test = place.partition("::")
    text = (ROOT / file).read_text(encoding="utf-8")
    for command in commands:
        if test:
            assert not telling_words(command) - words_of_test(text, test), command
        else:
            assert command in text.splitlines()


def telling_words(command: str) -> set[str]:
    """Subcommands, the script's name and options of a command, as a test writes them."""
    words = shlex.split(command.rpartition("; do ")[2].removesuffix("; done"))
    found = {word.partition("=")[0] for word in words[1:] if word.startswith("-")} - {"-m"}
    found |= {Path(word).name for word in words if word.endswith((".sh", ".py")) and word not in TOOLS}
    if words[0] == "megasdc" or words[:3] == BENCH:
        named = words[1:3] if words[0] == "megasdc" else words[3:4]
        found |= set(itertools.takewhile(re.compile(r"[a-z]+(-[a-z]+)*").fullmatch, named))
    return {WRITTEN_THERE.get(word, word) for word in found}


def words_of_test(text: str, test: str) -> set[str]:
    """Words in the strings of a test, and names of attributes; of all in its file that it uses, too."""
    defined: dict[str, ast.stmt] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            defined[node.targets[0].id] = node
    assert test in defined, f"there is no {test}"
    words, todo, seen = set[str](), [test], set[str]()
    while todo:
        name = todo.pop()
        if name in seen or name not in defined:
            continue
        seen.add(name)
        for part in ast.walk(defined[name]):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                words |= set(part.value.split())
            elif isinstance(part, ast.Attribute):
                words.add(part.attr)
            elif isinstance(part, ast.Name | ast.arg):
                todo.append(part.id if isinstance(part, ast.Name) else part.arg)
    return words


def make_sandbox(folder: Path) -> Path:
    """A folder that looks like a fresh clone; what commands write stays in it."""
    for name in ("configs", "docs", "launch", "tools", "README.md"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def run(folder: Path, command: str, programs: Path | None = None) -> str:
    """Run a command of a page in the sandbox and return what it printed; it must end with 0.

    ``programs`` is a folder of programs that are found before all others.
    """
    path = os.pathsep.join([*([str(programs)] if programs else []), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-ec", command],
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}"
    return done.stdout


def test_train_your_own_model(tmp_path: Path) -> None:
    """The commands under "Train your own model", as printed, train the copied file after a user's edits."""
    sandbox = make_sandbox(tmp_path)
    (block,) = [block for block in read_blocks(README) if block.heading == "Train your own model"]
    outputs = []
    for number, command in enumerate(block.commands):
        if not elsewhere(command):
            outputs.append(run(sandbox, command))
        if number == 0:
            _edit_as_a_user_would(sandbox / "my.json")
    summary, exported = outputs[-2:]
    assert re.search(r"steps\s+4 of 4", summary)
    assert "checkpoint: verified by the audit of step 5" in exported, "which looks at what the run ends with"
    assert (sandbox / "runs" / "my" / "checkpoints" / "step_00000004").is_dir()


def _edit_as_a_user_would(config: Path) -> None:
    """Four steps on three modules of the standard library."""
    edited = json.loads(config.read_text(encoding="utf-8"))
    sections = edited["megasdc"]
    sections["training"].update(steps=4, eval_interval=4, eval_samples=4)
    sections["data"]["sources"] = [{"pattern": "argparse.py"}, {"pattern": "ast.py"}, {"pattern": "inspect.py"}]
    sections["data"]["tokenizer"] = {"vocab_size": 500, "train_characters": 100_000}
    sections["data"]["split"] = [8, 1, 1]
    config.write_text(json.dumps(edited), encoding="utf-8")


@pytest.fixture(scope="module")
def smoke_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sandbox with what the quick start makes - prepared text, the finished run ``runs/smoke`` - and latencies."""
    sandbox = make_sandbox(tmp_path_factory.mktemp("readme"))
    run(sandbox, "megasdc prepare-data --config configs/smoke.json")
    run(sandbox, "megasdc launch --num-ranks 2 --config configs/smoke.json")
    np.save(sandbox / "recorded.npy", np.random.default_rng(1).gamma(4.0, 0.1, (4, 20, 12)))
    return sandbox


@pytest.mark.parametrize("page", ["first-run", "drill", "moving-layouts", "dropcompute"])
def test_a_tutorial_runs(tmp_path: Path, page: str) -> None:
    """Its blocks, as printed, in order, in what looks like a fresh clone: each ends with 0.

    The real launcher starts real ranks, but each of their processes is a fork of a server that has imported what it
    needs; with fresh ones ``test_train_your_own_model`` and the quick start run.
    """
    sandbox = make_sandbox(tmp_path)
    blocks = read_blocks(DOCS / "tutorials" / f"{page}.md")
    assert len(blocks) > 3
    with tempfile.TemporaryDirectory() as folder, forked_programs(Path(folder)) as programs:
        for block in blocks:
            run(sandbox, block.text, programs)


@pytest.mark.cluster
@pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))
def test_the_tutorial_of_two_hosts_runs(tmp_path: Path) -> None:
    """Its blocks, as printed, between two test hosts: checked, started, a host lost, ended, and compared.

    Ranks are fresh processes.
    """
    sandbox = make_sandbox(tmp_path)
    said = [run(sandbox, block.text) for block in read_blocks(DOCS / "tutorials" / "two-hosts.md")]
    whole = "\n".join(said)
    lost, ended = (text for text in said if "megasdc launch: launch " in text and "step " in text)
    assert "\nnode2\n" in said[0] and "exit code 78" in lost
    assert "rank 1 on node2: no done record (killed or host lost" in lost
    assert "node2: cannot be reached over SSH" in lost
    assert "all 2 ranks are done" in ended and re.search(r"steps\s+60 of 60", ended), whole
    assert {path.name for path in (sandbox / "nodes").glob("*.manifest")} == {"node1.manifest", "node2.manifest"}


USED = [block for page in (README, *(DOCS / "guides" / f"{name}.md" for name in GUIDES)) for block in read_blocks(page)]


def test_every_guide_has_its_place() -> None:
    """None is left out of the order in which they are run."""
    assert sorted(GUIDES) == sorted(page.stem for page in (DOCS / "guides").glob("*.md"))


def test_the_kubernetes_job_decides_on_every_exit_code() -> None:
    """Each code fails the job or starts it again, as the page's table says; that of excluded nodes is never raised."""
    page = (DOCS / "guides" / "kubernetes.md").read_text(encoding="utf-8")
    (listed,) = re.findall(r"action: FailJob.*\n.*values: \[(.*)\]", page)
    failing = {int(code) for code in listed.split(",")}
    rows = re.findall(r"^\| ([\d, +n-]+)(?:: \w+)? \| (.*?) \|", page, re.MULTILINE)
    told = {
        action: {int(code) for row, text in rows if action in text for code in re.findall(r"\b\d+\b", row)}
        for action in ("fails", "counts")
    }
    assert told["fails"] == failing and not failing & told["counts"]
    assert failing | told["counts"] >= (ERRORS_BY_EXIT_CODE.keys() - {ExcludedNodeError.exit_code}) | {1, 2}


@pytest.mark.full
@pytest.mark.parametrize("block", USED, ids=lambda block: f"{block.page}, {block.heading}, line {block.line}")
def test_every_command_runs(smoke_run: Path, block: Block) -> None:
    """Blocks run in order in one folder: each command ends with 0, later ones use what earlier ones made."""
    for command in block.commands:
        if not elsewhere(command):
            run(smoke_run, shortened(command))


def shortened(command: str) -> str:
    """The command with less to do, where the numbers of a page take hours."""
    for pattern, short in SHORTER:
        command = re.sub(pattern, short, command)
    return command
