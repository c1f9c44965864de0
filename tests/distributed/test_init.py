"""Does `megasdc init` ask what it needs on a terminal?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from terminal import Terminal

pytestmark = pytest.mark.distributed


def test_questions_have_defaults_and_are_asked_again(tmp_path: Path) -> None:
    """Only what no option gives is asked; an empty line is the default; what cannot be is asked again, with the reason;
    the file has the answers, and the commands to go on are printed.
    """
    file = tmp_path / "own.json"
    terminal = Terminal(["init", str(file), "--protect", "strict"], columns=200)
    for question, answer in (
        ("Text (", ""),
        ("Tokenizer (", "train:600"),
        ("Parameters (", "many"),
        ("such as 124m or 1.5b", "2m"),
        ("Ranks on this host, or a hostfile [2]", "0"),
        ("needed a number of ranks", "4"),
        ("Precision (", "bf16"),
    ):
        terminal.wait_for(question)
        terminal.type(answer)
    assert terminal.wait() == 0, terminal.screens
    assert "Protection (" not in terminal.screens
    assert f"megasdc launch --num-ranks 4 --config {file}" in terminal.screens
    config = json.loads(file.read_text())
    assert config["bf16"] == {"enabled": True} and config["megasdc"]["protect"] == "strict"
    assert config["megasdc"]["data"]["tokenizer"] == {"vocab_size": 600} and "sources" not in config["megasdc"]["data"]
