"""The command line: results on stdout, messages on stderr, documented exit codes, an example in every help."""

import io
import json
import logging
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from megasdc import __version__
from megasdc.cli import app, compare, main
from megasdc.cli.app import GROUPS, Application, help_group_of, is_unexpected, print_result
from megasdc.cli.options import option
from megasdc.common.errors import ConfigError, StorageError
from megasdc.config.load import load_config
from megasdc.data.manifest import SplitRecord

SMOKE = Path(__file__).parents[2] / "configs" / "smoke.json"
NO_DATA = f"data: prepared/stdlib is not there yet: run megasdc prepare-data --config {SMOKE}"

SHORTER = (
    *("--set", "megasdc.training.steps=40"),
    *("--set", "scheduler.params.total_num_steps=400"),
    *("--set", "scheduler.params.warmup_num_steps=40"),
)
"""Options that leave the schedule, which would follow the steps, as long as it was: four warnings."""


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def commands():
    """Yield the argument list of every command, those of sub-applications too."""
    todo = [([], typer.main.get_command(app))]
    while todo:
        path, command = todo.pop()
        yield path
        todo += [([*path, name], inner) for name, inner in getattr(command, "commands", {}).items()]


@pytest.mark.parametrize("command", list(commands()), ids=" ".join)
def test_every_help_has_an_example(command):
    """--help of the program and of every command shows a call that can be copied."""
    result = run(*command, "--help")
    assert result.exit_code == 0
    assert "Example: megasdc" in result.output


def test_every_command_is_in_a_group_of_help():
    """One that is in none would come last, under a heading of its own; flags have no type, and lines no old breaks."""
    program = typer.main.get_command(app)
    assert [name for name in program.commands if help_group_of(name) is None] == []
    text = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "120"}).stdout
    places = [text.index(f" {heading} ") for heading in GROUPS]
    assert places == sorted(places) and "<bool>" not in text
    help_of_run = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "200"}).stdout
    assert "<bool>" not in help_of_run and "and return the true exit code" in help_of_run
    assert "<bool>" not in CliRunner().invoke(app, ["golden", "--help"]).stdout


@pytest.mark.parametrize(
    ("typed", "said"), [("train", "megasdc launch"), ("status", "megasdc top"), ("lanch", "launch")]
)
def test_a_name_that_people_type_is_answered_with_the_command(typed, said):
    """Exit code 2, as for every mistake; names that are commands are never answered so."""
    result = CliRunner().invoke(app, [typed, "--config", "x"], env={"COLUMNS": "200"})
    assert result.exit_code == 2 and f"No such command '{typed}'" in result.output and said in result.output


@pytest.mark.parametrize("command", ["run", "check-determinism"])
def test_a_command_line_without_dashes_is_shown_with_them(command):
    """Its options are DeepSpeed's and the script's; one of the same name was taken as megasdc's own."""
    words = ["deepspeed", "--num_gpus", "2", "train.py", "--config", "x y"]
    result = CliRunner().invoke(app, [command, *words], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert f"megasdc {command} -- deepspeed --num_gpus 2 train.py --config 'x y'" in result.output.replace(
        "root", "megasdc"
    )


def test_check_config_says_its_verdict(monkeypatch, tmp_path):
    """What came out is the first line, then what protects the run, what was not checked, and layout."""
    monkeypatch.chdir(tmp_path)
    result = run("check-config", SMOKE, *SHORTER, "--world-size", 2)
    assert result.exit_code == 0
    verdict, covered, cost, uncovered, *notes, layout, memory, _header, _one_stage = result.stdout.splitlines()
    assert notes == [NO_DATA]
    names = [line.partition(":")[0] for line in (covered, cost, uncovered)]
    assert names == [f"protect standard, {name}" for name in ("covered", "cost", "not covered")]
    assert memory == "predicted peak of a step on a CPU, MiB of tensors of a rank:"
    assert verdict == f"{SMOKE}: OK, with 4 warnings"
    assert layout.startswith("2 ranks = tensor 1 x pipeline 1 x data 2")
    assert "warning: scheduler.params.total_num_steps" in result.stderr
    without = "layout and batch not checked: give --world-size N"
    off = ("--set", "megasdc.protect=off")
    assert run("check-config", SMOKE, *off).stdout == f"{SMOKE}: OK\n{NO_DATA}\n{without}\n"
    assert json.loads(run("check-config", SMOKE, "--json", *off).stdout)["notes"] == [NO_DATA, without]
    manifest = tmp_path / "prepared" / "stdlib" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.touch()
    assert run("check-config", SMOKE, *off).stdout == f"{SMOKE}: OK\n{without}\n"


def test_check_config_says_what_is_missing_and_what_disturbs_the_run(monkeypatch, tmp_path):
    """A golden trace or a checkpoint to start from that is not there, with the command; armed faults and delays."""
    monkeypatch.chdir(tmp_path)
    given = [
        "megasdc.protect=off",
        'megasdc.faults=[{"kind": "bit_flip"}]',
        'megasdc.process_faults=[{"kind": "exit"}, {"kind": "hang"}]',
        'megasdc.delay=[{"kind": "exponential", "mean_s": 1}]',
        "megasdc.determinism.enabled=true",
        "megasdc.sdc.golden=none.golden",
        "megasdc.checkpoint.universal=none",
        "megasdc.model.initial_weights=nothing",
    ]
    options = [word for text in given for word in ("--set", text)]
    _data, golden, universal, weights, *armed, _layout = json.loads(
        run("check-config", SMOKE, "--json", *options).stdout
    )["notes"]
    assert golden.startswith(f"sdc.golden: none.golden is not there yet: run megasdc golden record --config {SMOKE}")
    assert "--out none.golden" in golden and "sdc.golden=" not in golden
    assert "checkpoint.universal: there is no folder none" in universal
    assert "model.initial_weights: there is no folder nothing" in weights
    starts = ("megasdc.faults: 1 entry:", "megasdc.process_faults: 2 entries:", "megasdc.delay: 1 entry:")
    assert [text.startswith(start) for text, start in zip(armed, starts, strict=True)] == [True] * 3


def test_check_config_predicts_the_memory_of_a_step():
    """A line a stage whose parts add up, a warning where a device is too small, and no figure where none is known."""
    size = ("--vocab-size", 4096, "--world-size", 2)
    (stage,) = json.loads(run("check-config", SMOKE, "--json", *size).stdout)["memory"]
    parts = ("weights", "masters", "moments", "gradients", "activations", "logits", "temporary")
    assert stage["total"] == sum(stage[part] for part in parts)
    assert f"{stage['total'] / 2**20:,.1f}  {stage['moment']}" in run("check-config", SMOKE, *size).stdout
    (on_gpu,) = json.loads(run("check-config", SMOKE, "--json", *size, "--device-memory-gib", 80).stdout)["memory"]
    assert on_gpu["total"] > 4 * 500_000_000 > stage["total"]  # DeepSpeed's own bucket, fp32
    gib = on_gpu["total"] / 2**30
    assert "predicted to need" in run("check-config", SMOKE, *size, "--device-memory-gib", gib * 0.99).stderr
    fitting = run("check-config", SMOKE, *size, "--device-memory-gib", 80)
    assert fitting.stderr == ""
    assert fitting.stdout.splitlines()[-1] == f"largest rank {gib:,.2f} of 80 GiB: fits"
    assert run("check-config", SMOKE, *size, "--device-memory-gib", gib * 1.01).stderr == ""
    assert "fits" not in run("check-config", SMOKE, *size, "--device-memory-gib", gib * 0.99).stdout
    dropout = ("--set", "megasdc.model.hidden_dropout=0.1")
    assert (
        "is not predicted with megasdc.model.hidden_dropout set" in run("check-config", SMOKE, *size, *dropout).stdout
    )


def test_check_config_says_what_replicas_agree_on():
    """How many, how often, by which rule, on how many samples and bytes; nothing where the file asks for none."""
    given = {"replicas": 4, "every": 10, "outer": "nesterov", "deadline_s": 7.0, "threshold": 2.5}
    sets = [word for name, value in given.items() for word in ("--set", f"megasdc.local_sgd.{name}={value}")]
    steps = ("--set", "megasdc.training.steps=100", "--set", "megasdc.checkpoint.interval=10")
    steps = (*steps, "--set", "megasdc.training.eval_interval=0", "--world-size", 2, "--vocab-size", 4096)
    found = json.loads(run("check-config", SMOKE, "--json", *sets, *steps).stdout)
    rounds, batch = found["local_sgd"], found["layout"]["train_batch_size"]
    assert given.items() <= rounds.items() and rounds["rounds"] == 10 and rounds["outer_momentum"] == 0.9
    length = found["resolved"]["megasdc"]["data"]["sequence_length"]
    assert (rounds["samples"], rounds["tokens"]) == (4 * 10 * batch, 4 * 10 * batch * length)
    two = json.loads(
        run("check-config", SMOKE, "--json", *sets, *sets[:1], "megasdc.local_sgd.replicas=2", *steps).stdout
    )
    assert rounds["fetched_bytes"] == 6 * two["local_sgd"]["fetched_bytes"] > 0
    text = run("check-config", SMOKE, *sets, *steps).stdout
    assert f"each of 4 replicas: 2 ranks = tensor 1 x pipeline 1 x data 2; {batch} samples a step" in text
    assert "every 10 steps (nesterov, outer_lr 0.7, outer_momentum 0.9), 10 rounds in all" in text
    assert f"{40 * batch:,} samples ({4 * batch:,} a step), {rounds['tokens']:,} tokens of all replicas" in text
    assert f"{rounds['fetched_bytes'] / 1e6:,.1f} MB in all" in text
    assert "waited for 7 s" in text and "no micro-batch after 2.5 s of a round" in text
    assert json.loads(run("check-config", SMOKE, "--json").stdout)["local_sgd"] is None


def test_check_config_prints_a_file_that_loads_to_the_same(tmp_path):
    """With --show its output is the resolved file and nothing else."""
    result = run("check-config", SMOKE, *SHORTER, "--world-size", 2, "--show")
    assert result.exit_code == 0
    assert result.stderr.startswith(f"{SMOKE}: OK, with 4 warnings\n")
    path = tmp_path / "resolved.json"
    path.write_text(result.stdout)
    assert load_config(path) == load_config(SMOKE, SHORTER[1::2])
    assert "warning: scheduler.params.total_num_steps" in result.stderr
    assert "2 ranks = tensor 1 x pipeline 1 x data 2" in result.stderr


def test_a_host_without_a_gpu_is_not_warned_of():
    """DeepSpeed's line that it found no accelerator is left out; its other warnings are not."""
    import deepspeed.accelerator.real_accelerator as real

    assert "Setting accelerator to CPU." in Path(real.__file__).read_text()  # the text that is left out
    logger = logging.getLogger("hushed")
    lines = io.StringIO()
    logger.addHandler(logging.StreamHandler(lines))
    logger.addFilter(is_unexpected)
    logger.warning("Setting accelerator to CPU. If you have GPU or other accelerator, we were unable to detect it.")
    logger.warning("something else")
    has_gpu = bool(list(Path("/dev").glob("nvidia[0-9]*"))) or Path("/dev/kfd").exists()
    assert lines.getvalue().splitlines()[-1:] == ["something else"]
    assert ("Setting accelerator" in lines.getvalue()) == has_gpu


def test_check_config_as_json():
    """--json gives one object with the verdict, for right and for wrong files."""
    good = run("check-config", SMOKE, "--json", "--world-size", 2)
    found = json.loads(good.stdout)
    assert found["ok"] and found["layout"]["data"] == 2 and found["warnings"] == []
    bad = run("check-config", SMOKE, "--json", "--set", "megasdc.training.steps=0", "--set", "x=1")
    assert bad.exit_code == 70
    assert len(json.loads(bad.stdout)["problems"]) == 2


@pytest.mark.parametrize("arguments", [["--set", "megasdc.training.steps=0"], ["--world-size", "99"]])
def test_wrong_configuration_exits_with_70(arguments):
    """Through the real entry point: one message on stderr, nothing on stdout, exit code 70, no traceback."""
    command = [sys.executable, "-m", "megasdc", "check-config", str(SMOKE), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 70
    assert done.stdout == ""
    assert done.stderr.startswith("megasdc: error: 1 problem in") and "Traceback" not in done.stderr


def test_version_and_usage_errors(monkeypatch, capsys):
    """--version prints the versions, installed packages' too; an unknown option is a usage error with exit code 2."""
    own, others, state = run("--version").output.splitlines()
    assert own == f"megasdc {__version__}"
    assert re.fullmatch(r"Python 3\S+, PyTorch 2\S+, DeepSpeed 0\S+, Megatron-core 0\S+", others)
    assert state.startswith("these together: ")
    monkeypatch.setattr(sys, "argv", ["megasdc", "check-config", "--no-such-option"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert "No such option" in capsys.readouterr().err


def test_config_table_write_and_check(tmp_path):
    """--check fails until --write has put the table in; a file without markers is a usage error."""
    file = tmp_path / "page.md"
    file.write_text("<!-- config-table:begin -->\n<!-- config-table:end -->\n")
    assert run("config-table", "--check", file).exit_code == 1
    assert run("config-table", "--write", file).exit_code == 0
    assert run("config-table", "--check", file).exit_code == 0
    assert run("config-table").stdout in file.read_text()
    file.write_text("nothing")
    assert run("config-table", "--write", file).exit_code == 2


def test_config_table_is_written_whole_or_not_at_all(tmp_path):
    """Where the disk is full the file keeps what it held, and nothing lies beside it."""
    file = tmp_path / "page.md"
    file.write_text(old := "<!-- config-table:begin -->\n<!-- config-table:end -->\n")
    limit = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    limit += "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)); "
    program = limit + "import runpy; runpy.run_module('megasdc', run_name='__main__')"
    command = [sys.executable, "-c", program, "config-table", "--write", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, file.read_text(), os.listdir(tmp_path)) == (77, old, ["page.md"]), done.stderr


def test_prepare_data_calls_the_library_with_the_section(monkeypatch, tmp_path):
    """prepare-data passes the data section, folder, workers and force on, and prints the manifest as JSON."""
    prepare = pytest.importorskip("megasdc.data.prepare")
    calls = []

    class Manifest:
        unigram_entropy_nats = 6.5
        round_trip = None  # as of a version before it was measured
        sources = []
        splits = {"valid": SplitRecord(num_documents=1, num_tokens=70, num_bytes=None)}

        def model_dump(self, mode):
            return {"format_version": 1}

    def fake(section, out_dir, workers, *, progress, force):
        calls.append((section.path, out_dir, workers, progress, force))
        return Manifest()

    monkeypatch.setattr(prepare, "prepare", fake)
    result = run("prepare-data", "--config", SMOKE, "--out", tmp_path / "a b", "--workers", 2, "--force", "--json")
    assert calls == [("prepared/stdlib", tmp_path / "a b", 2, False, True)]
    assert json.loads(result.stdout) == {"path": str(tmp_path / "a b"), "manifest": {"format_version": 1}}
    assert "tokens: 70 valid; a token has 6.500 nats" in run("prepare-data", "--config", SMOKE).stdout
    assert calls[1] == ("prepared/stdlib", Path("prepared/stdlib"), 1, True, False)


def test_home_folders_of_every_path(monkeypatch, tmp_path):
    """``~`` of a path is the home folder, which shells do not write for ``--out=~/x``; none is one of that name."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "home" / "c").mkdir(parents=True)
    (tmp_path / "home" / "smoke.json").write_bytes(SMOKE.read_bytes())
    calls = []
    monkeypatch.setattr("megasdc.data.prepare.prepare", lambda *given, **named: calls.append(given) or {}["end"])
    assert isinstance(run("prepare-data", "--config=~/smoke.json", "--out=~/x").exception, KeyError)
    assert calls[0][1] == tmp_path / "home" / "x"
    assert run("schema", "--out=~/schema.json").exit_code == 0
    assert json.loads((tmp_path / "home" / "schema.json").read_text())
    assert (
        run("archive", "list", "~/c").exception.args == run("archive", "list", tmp_path / "home" / "c").exception.args
    )
    assert CliRunner().invoke(compare.traces_script, ["~/a", "~/b"]).output.count(str(tmp_path / "home" / "a")) > 0
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    unknown = run("check-config", "~nobody_at_all/smoke.json")
    assert isinstance(unknown.exception, ConfigError) and "the home folder is not known" in str(unknown.exception)


def test_results_that_cannot_be_written_are_refused_before_the_work(tmp_path):
    """--out below a file, or a folder itself, ends with the code for storage before any other complaint."""
    (tmp_path / "file").touch()
    for out in (tmp_path / "file" / "x", tmp_path):
        for command in (["verify", tmp_path / "none.golden"], ["record", "--config", tmp_path / "none.json"]):
            done = run("golden", *command, "--out", out)
            assert isinstance(done.exception, StorageError)
            assert f"{out} cannot be written" in str(done.exception)


def test_a_result_is_printed_before_it_is_written(tmp_path, capsys):
    """A file that cannot be written any more costs the file alone."""

    class Result:
        def as_dict(self):
            return {"a": 1}

    with pytest.raises(StorageError, match="cannot be written"):
        print_result(Result(), None, out=tmp_path / "gone" / "x.json", as_json=True)
    assert json.loads(capsys.readouterr().out) == {"a": 1}


@pytest.mark.parametrize("name", ["export_hf", "import_hf"])
def test_thin_scripts_call_the_commands(name):
    """tools/NAME.py is the command of that name, and its docstring shows a call."""
    script = Path(__file__).parents[2] / "tools" / f"{name}.py"
    done = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert f"Example: megasdc {name.replace('_', '-')}" in done.stdout
    assert f"python tools/{name}.py" in script.read_text()


def test_fields_of_a_dataclass_are_options_in_their_order() -> None:
    """A command gets them as one object: defaults, values, repeated ones as a tuple; a missing one is a usage error.

    A field without a declaration keeps its default.
    """

    @dataclass(frozen=True)
    class Options:
        file: Annotated[str, typer.Argument()]
        number: int = option(3, "A number.", min=1)
        names: tuple[str, ...] = option((), "Names.", "--name")
        fixed: int = 5

    got = []
    small = Application(add_completion=False)

    @small.command("small")
    def keep(first: int = 0, *, options: Options, flag: bool = False) -> None:
        got.append((first, options, flag))

    command = typer.main.get_command(small)
    assert [one.name for one in command.params] == ["first", "file", "number", "names", "flag"]
    assert CliRunner().invoke(small, ["a"]).exit_code == 0
    assert CliRunner().invoke(small, ["b", "--name", "x", "--number", "4", "--name", "y", "--flag"]).exit_code == 0
    assert got == [(0, Options("a"), False), (0, Options("b", 4, ("x", "y")), True)]
    assert CliRunner().invoke(small, []).exit_code == 2
    assert CliRunner().invoke(small, ["a", "--number", "0"]).exit_code == 2
