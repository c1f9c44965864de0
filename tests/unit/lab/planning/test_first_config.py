"""`megasdc init`: shapes are published ones, files are short and right, and nothing is written by mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megasdc.cli import app
from megasdc.config.checks import check_layout, find_warnings
from megasdc.config.load import load_config
from megasdc.config.model import PRESETS
from megasdc.lab.planning.first_config import choose_shape, parse_parameters

GIVEN = ("--text", "stdlib", "--parameters", "1m", "--ranks", "2")


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["init", *map(str, arguments)], env={"COLUMNS": "200"})


@pytest.fixture(name="here", autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "layers", "width", "heads"),
    [("6.7b", 32, 4096, 32), ("13b", 40, 5120, 40), ("175b", 96, 12288, 96)],
)
def test_shapes_of_large_models_are_those_of_gpt_3(text: str, layers: int, width: int, heads: int) -> None:
    """Brown et al. 2020, table 2.1 (whose 13B has 5140 in print, which 40 heads of 128 do not make)."""
    found = choose_shape(parse_parameters(text), 50257)
    assert found.fields == {"num_layers": layers, "hidden_size": width, "num_attention_heads": heads}


def test_124m_is_gpt_2() -> None:
    """12 x 768 with any vocabulary, named or found by the rule; and the count is the published one of GPT-2 small."""
    named = choose_shape(124_000_000, 50257)
    assert named.fields == {"preset": "gpt2-124m"} == choose_shape(124_000_000, 8192).fields
    padding = 50304 - 50257  # of the vocabulary, to a multiple of 128
    assert named.parameters == 124_439_808 + padding * 768
    by_rule = {"num_layers": 12, "hidden_size": 768, "num_attention_heads": 12}
    assert choose_shape(124_000_001, 50257).fields == by_rule
    assert choose_shape(355_000_000, 50257).fields == {"preset": "gpt2-355m"}


@pytest.mark.parametrize("tensor", [1, 2, 8])
@pytest.mark.parametrize("pipeline", [1, 4])
@pytest.mark.parametrize("number", [1_000_000, 30_000_000, 124_000_000, 1_500_000_000, 7_000_000_000])
def test_a_shape_divides_by_the_layout_and_is_near_its_number(number: int, tensor: int, pipeline: int) -> None:
    """Heads by the tensor size, layers by the stages; without a layout it is within 5 %, or GPT-2's own."""
    found = choose_shape(number, 512, tensor, pipeline)
    sizes = PRESETS.get(found.fields.get("preset", ""), found.fields)
    assert sizes["num_attention_heads"] % tensor == sizes["num_layers"] % pipeline == 0
    assert sizes["hidden_size"] % sizes["num_attention_heads"] == 0
    if (tensor, pipeline) == (1, 1) and "preset" not in found.fields:
        assert abs(found.parameters / number - 1) <= 0.05


@pytest.mark.parametrize("text", ["", "m", "12x", "-1m", "1e9", "10", "99t"])
def test_what_is_no_number_of_parameters_is_told_so(text: str) -> None:
    """Exit code 2 and the form that is needed."""
    with pytest.raises(ValueError, match="such as 124m or"):
        parse_parameters(text)
    result = call("a.json", "--text", "stdlib", "--ranks", "2", f"--parameters={text}")
    assert result.exit_code == 2 and "such as 124m" in result.output and not Path("a.json").exists()


@pytest.mark.parametrize(
    "options",
    [
        GIVEN,
        (*GIVEN, "--precision", "bf16", "--protect", "strict", "--tokenizer", "train:600", "--sequence-length", "4096"),
        ("--text", "stdlib", "--parameters", "124m", "--ranks", "8", "--tensor", "2", "--pipeline", "2"),
        ("--text", "hub:some/data", "--tokenizer", "some/tokenizer", "--parameters", "30m", "--ranks", "64"),
        (*GIVEN, "--steps", "30", "--samples", "6", "--protect", "off"),
    ],
)
def test_a_file_is_short_and_right(options: tuple[str, ...]) -> None:
    """At most 25 lines, no warning, a round trip of JSON, no field that follows, and the three commands to go on."""
    result = call("own.json", *options, "--json")
    assert result.exit_code == 0, result.output
    said, text = json.loads(result.stdout), Path("own.json").read_text()
    assert len(text.splitlines()) <= 25 and json.loads(text) == said["config"]
    assert not {"gradient_accumulation_steps", "scheduler", "zero_optimization"} & said["config"].keys()
    config = load_config("own.json")
    assert find_warnings(config) == [] == said["check"]["warnings"]
    ranks = int(options[options.index("--ranks") + 1])
    assert said["check"]["layout"]["world_size"] == check_layout(config, ranks).world_size == ranks
    if "--samples" not in options:  # README goes on to two hosts with the same file
        assert check_layout(config, 2 * ranks).train_batch_size == config.deepspeed["train_batch_size"]
    launch = f"megasdc launch --num-ranks {ranks} --config own.json"
    assert said["commands"] == ["megasdc prepare-data --config own.json", f"{launch} --dry-run", launch]
    assert config.megasdc.logging.run_dir == "runs/own"


def test_text_decides_tokenizer_documents_and_length(here: Path) -> None:
    """Little text in one file: fewer entries, a document a paragraph, four passes at most; not so with JSON lines."""
    (here / "corpus").mkdir()
    (here / "corpus" / "a.txt").write_text("word " * 60_000)  # 300 kB, 75,000 tokens
    assert call("a.json", "--text", "corpus", "--parameters", "10m", "--ranks", "2").exit_code == 0
    sections = json.loads(Path("a.json").read_text())["megasdc"]
    assert sections["data"]["sources"] == [{"kind": "files", "path": "corpus", "text_unit": "paragraph"}]
    assert sections["data"]["tokenizer"] == {"vocab_size": 1024}
    batch = json.loads(Path("a.json").read_text())["train_batch_size"] * 512
    assert sections["training"]["steps"] == max(10, round(4 * 75_000 / batch))
    (here / "corpus" / "b.jsonl").write_text('{"text": "x"}\n')
    assert call("b.json", "--text", "corpus", "--parameters", "10m", "--ranks", "2").exit_code == 0
    assert "text_unit" not in Path("b.json").read_text()


def test_what_is_missing_is_named_and_nothing_is_replaced(here: Path) -> None:
    """Without a terminal: all options that are needed, exit code 2; a file that is there stays, unless forced."""
    result = call()
    assert result.exit_code == 2 and "missing --text, --parameters, --ranks (or --hostfile)" in result.output
    assert "missing --ranks (or --hostfile):" in call("--text", "stdlib", "--parameters", "1m").output
    (here / "my.json").write_text("mine")
    result = call("my.json", *GIVEN)
    assert result.exit_code == 2 and "--force" in result.output and (here / "my.json").read_text() == "mine"
    assert call("my.json", *GIVEN, "--force").exit_code == 0
    assert json.loads((here / "my.json").read_text())["megasdc"]["protect"] == "standard"


def test_what_cannot_be_trained_is_refused_before_anything_is_written(here: Path) -> None:
    """Ranks that do not divide, text and tokenizers that are not there, hosts that cannot be read."""
    bad = {
        70: (*GIVEN, "--pipeline", "3"),
        71: ("--text", "nowhere", "--parameters", "1m", "--ranks", "2"),
        78: ("--text", "stdlib", "--parameters", "1m", "--hostfile", "hosts"),
    }
    (here / "hosts").write_text("node1 slots=none\n")
    for code, options in bad.items():
        found = CliRunner().invoke(app, ["init", "a.json", *options])
        assert found.exception is not None and getattr(found.exception, "exit_code", None) == code, found.output
    found = CliRunner().invoke(app, ["init", "a.json", *GIVEN, "--tokenizer", "./gone.model"])
    assert "is not there" in str(found.exception)
    assert not (here / "a.json").exists()
    (here / "hosts").write_text("node1 slots=2\nnode2 slots=2\n")
    both = call("a.json", *GIVEN, "--hostfile", "hosts")
    assert both.exit_code == 2 and "not both" in both.output
    done = call("a.json", "--text", "stdlib", "--parameters", "1m", "--hostfile", "hosts")
    assert done.exit_code == 0 and "megasdc launch --hostfile hosts --config a.json" in done.stdout
    assert "4 ranks = tensor 1" in done.stdout
