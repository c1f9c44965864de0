"""Is a wrong `checkpoint.archive` refused with what to do, and is a secret never shown?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from field_values import BASE

from megasdc.common.errors import ConfigError
from megasdc.config.load import parse_config


def problems(archive: Any, **sections: Any) -> list[str]:
    """Problems of a file with this section and these."""
    raw = json.loads(json.dumps(BASE))
    raw["megasdc"] |= {"checkpoint": {"archive": archive}, **sections}
    with pytest.raises(ConfigError) as error:
        parse_config(raw)
    return error.value.problems


@pytest.mark.parametrize(
    "archive",
    [
        {"address": "s3://KEY:s3cr3t@bucket/a"},
        {"address": "s3://KEY:s3/cr3t@bucket/a"},
        {"address": "s3://bucket/a?secret=s3cr3t"},
        "s3://KEY:s3cr3t@bucket/a",
        {"adress": "s3://KEY:s3cr3t@bucket/a"},
        {"address": ["s3://KEY:s3cr3t@bucket/a"]},
    ],
)
def test_a_secret_is_refused_and_not_shown(archive: Any) -> None:
    """Wherever it stands in the section, also where the section itself is wrong."""
    found = problems(archive)
    assert len(found) == 1 and "megasdc.checkpoint.archive" in found[0]
    assert "cr3t" not in found[0]


def test_the_remedy_is_told() -> None:
    """Where credentials belong."""
    (found,) = problems({"address": "s3://KEY:s3cr3t@bucket/a"})
    assert "AWS_ACCESS_KEY_ID" in found and "~/.config/fsspec" in found


def test_fields_without_an_address_have_no_effect() -> None:
    """So they are refused."""
    assert "set megasdc.checkpoint.archive.address, or remove it" in problems({"every": 2})[0]
    assert "set megasdc.checkpoint.archive.address, or remove it" in problems({"keep_last": 2})[0]


def test_a_study_is_refused() -> None:
    """Its replicas share the id of one launch."""
    study = {"study": {"mode": "free_run", "replicas": 2}, "determinism": {"enabled": True}}
    study["training"] = {"steps": 3, "eval_interval": 1}  # type: ignore[dict-item]
    assert any("megasdc archive push" in one for one in problems({"address": "a"}, **study))


def test_the_example_archives() -> None:
    """configs/archived.json."""
    raw = json.loads((Path(__file__).parents[3] / "configs" / "archived.json").read_text())
    config = parse_config(raw)
    assert config.megasdc.checkpoint.archive.address == "runs/archive"
    assert config.resolved()["megasdc"]["checkpoint"]["archive"]["every"] == 400
