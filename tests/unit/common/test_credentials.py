"""Secrets are recognised by their names, places and shapes, and other text is left as it is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megasdc.attached.settings import load_settings
from megasdc.common.credentials import find_secrets, is_secret_name, without_credentials, words_without_credentials
from megasdc.common.errors import ConfigError
from megasdc.config.fields import field_rows
from megasdc.config.load import WholeFile, load_config, parse_config

FILE: dict[str, Any] = {
    "megasdc": {"data": {"path": "d"}, "protect": "off", "training": {"steps": 1}, "logging": {"run_dir": "r"}}
}
PLAIN = (
    *("tokens=5 tokenizer=3 num_tokens: 4", "http://127.0.0.1:9400/a", "ssh://git@host/a", "what?a=b", "key=5"),
    *('{"tokens": 5, "token": 3}', '{"secret": null}', "launch --help token (x)", "s3://bucket/a"),
    *("step 3: loss 4.5", "next token: 3 of 4", "the basic checks passed", "bearer of news"),
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("PUT s3://KEY:hidden@bucket/a", "PUT s3://...@bucket/a"),
        ("https://hiddenhiddenhidden@host/x", "https://...@host/x"),
        ("https://h/a?sig=hidden&x=1 failed", "https://h/a?... failed"),
        ("https://hooks.slack.com/services/T/B/hidden", "https://hooks.slack.com/..."),
        ("WANDB_API_KEY=hidden run", "WANDB_API_KEY=... run"),
        ("--api-key hidden --x 1", "--api-key ... --x 1"),
        ('{"api_key": "hid\\"den", "b": 1}', '{"api_key": "...", "b": 1}'),
        (json.dumps(["x", '{"api_key": "hidden", "b": 1}']), json.dumps(["x", '{"api_key": "...", "b": 1}'])),
        (json.dumps({"said": "API_KEY=hidden"}), json.dumps({"said": "API_KEY=..."})),
        ("secret_key='hid den' x", "secret_key='...' x"),
        ("Authorization: Bearer hidden.hidden", "Authorization: ..."),
        ("curl -H 'X: Bearer hiddenhidden'", "curl -H 'X: Bearer ...'"),
        ("with hf_" + "hidden" * 5, "with ..."),
        ("AKIAHIDDENHIDDEN1234", "..."),
        *((text, text) for text in PLAIN),
    ],
)
def test_texts(text: str, shown: str) -> None:
    """Only the secret is replaced; what is replaced already stays so."""
    assert without_credentials(text) == shown
    assert without_credentials(shown) == shown


def test_words_of_a_command() -> None:
    """An option and its value are two words."""
    assert words_without_credentials(["p", "--token", "hidden", "--x=1"]) == ["p", "--token", "...", "--x=1"]
    assert words_without_credentials(["p", "--token=hidden", "-q"]) == ["p", "--token=...", "-q"]


def test_options_of_an_address() -> None:
    """They are not shown, whatever they are; a file may have them unless their names say that they are secrets."""
    assert not list(find_secrets({"command": ["curl", "https://pager/alert?team=ml&x=1"]}))
    assert without_credentials("https://pager/alert?team=ml&x=1") == "https://pager/alert?..."
    for text in (
        "https://h/a?sv=1&sig=x",
        "https://h/a?X-Amz-Signature=x",
        "https://h/a?key=x",
        "https://h/a?b=1&token=x",
    ):
        assert list(find_secrets({"command": ["curl", text]}))


def test_no_field_of_ours_has_a_secret_name_but_one() -> None:
    """So nothing that a user writes into a field is refused for the field's name; DeepSpeed's key for Comet is."""
    named = {path for path, _, _ in field_rows(WholeFile, "") if is_secret_name(path.rpartition(".")[2])}
    assert named == {"comet.api_key"}
    assert not list(find_secrets(parse_config(FILE).resolved()))


@pytest.mark.parametrize(
    ("path", "value", "remedy"),
    [
        ("comet.api_key", "hidden", "COMET_API_KEY"),
        ("comet.apikey", "hidden", "in the environment"),
        ("wandb.api_key", "hidden", "in the environment"),
        ("megasdc.health.alert_command", ["page", "--token", "hidden"], "0600"),
        ("megasdc.health.alert_command", ["curl", "-u", "https://me:hidden@h"], "0600"),
        ("megasdc.health.alert_command", ["curl", "-H", "Authorization: Bearer hiddenhidden"], "0600"),
        ("megasdc.data.path", "s3://me:hidden@bucket/a", "0600"),
        ("megasdc.logging.password", "hidden", "0600"),
    ],
)
def test_a_file_with_a_secret_is_refused(tmp_path: Any, path: str, value: Any, remedy: str) -> None:
    """Once, with the place and the remedy and without the secret, from a file and from an override."""
    raw = json.loads(json.dumps(FILE))
    at = raw
    *folders, last = path.split(".")
    for name in folders:
        at = at.setdefault(name, {})
    at[last] = value
    (tmp_path / "f.json").write_text(json.dumps(raw))
    (tmp_path / "plain.json").write_text(json.dumps(FILE))
    for name, overrides in (("f.json", []), ("plain.json", [f"{path}={json.dumps(value)}"])):
        with pytest.raises(ConfigError) as caught:
            load_config(tmp_path / name, overrides)
        (text,) = (one for one in caught.value.problems if path in one)
        assert text.startswith(f"{path}: a secret is refused in the file, and not shown here")
        assert remedy in text
        assert "hidden" not in str(caught.value)


def test_a_line_that_is_no_json_is_shown_without_its_secret(tmp_path: Any) -> None:
    """A comma too many does not print a key."""
    (tmp_path / "f.json").write_text('{\n"comet": {"api_key": "hidden",,}\n}')
    with pytest.raises(ConfigError, match="line 2") as caught:
        load_config(tmp_path / "f.json")
    assert "hidden" not in str(caught.value)


def test_a_stored_configuration_with_a_secret_can_be_read() -> None:
    """Of a version that accepted it; the secret is not carried on."""
    raw = parse_config(FILE).resolved()
    raw["comet"] = {"enabled": False, "api_key": "planted"}
    assert "planted" not in json.dumps(parse_config(raw, stored=True).resolved())


def test_the_file_of_a_guard_with_a_secret_is_refused() -> None:
    """Its alert command would be an argument of each rank."""
    with pytest.raises(ConfigError, match=r"health\.alert_command: a secret is refused") as caught:
        load_settings({"logging": {"run_dir": "r"}, "health": {"alert_command": ["page", "--password=hidden"]}})
    assert "hidden" not in str(caught.value)
