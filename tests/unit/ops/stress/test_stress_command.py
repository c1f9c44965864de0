"""What does `megasdc stress` refuse before it starts anything?"""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from megasdc.cli import app
from megasdc.common.errors import MegasdcError


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--only", "gem"], "there is no test 'gem'"),
        (["--only", ""], "there is no test ''"),
        (["--only", "links"], "needs a --hostfile of two hosts or more"),
        (["--record"], "--record needs --golden DIR"),
        (["--record", "--golden", "x", "--hostfile", "x"], "--record needs --golden DIR"),
        (["--resume"], "--resume needs the --out FILE"),
        (["--rounds", "0"], "--rounds"),
        (["--timeout", "1"], "--timeout"),
    ],
)
def test_wrong_options_are_usage_errors(options: list[str], text: str) -> None:
    """Exit code 2, with what is needed."""
    result = CliRunner().invoke(app, ["stress", *options])
    assert result.exit_code == 2
    assert text in " ".join(result.output.replace("\u2502", " ").split())


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        (["--golden", "."], 80, "megasdc stress --record"),
        (["--hostfile", "hosts", "--drill", "node_10"], 70, "give node_10@HOST"),
        (["--drill", "node_99"], 70, "there is no node profile 'node_99'"),
        (["--hostfile", "none"], 78, "cannot be read"),
    ],
)
def test_wrong_values_are_errors_with_their_code(
    options: list[str], code: int, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The documented exit codes of hosts, configuration and golden values."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    error = CliRunner().invoke(app, ["stress", *options]).exception
    assert isinstance(error, MegasdcError)
    assert error.exit_code == code and text in str(error)
