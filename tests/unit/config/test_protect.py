"""One word protects a run: it adds fields that the file does not give, and never one that the file forbids."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from megasdc.common.errors import ConfigError
from megasdc.config.checks import check_layout, find_warnings
from megasdc.config.load import RunConfig, load_config, parse_config
from megasdc.config.protect import start_lines
from megasdc.config.schema import value_of

BASE: dict[str, Any] = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 1,
    "megasdc": {"data": {"path": "x"}, "training": {"steps": 100}, "logging": {"run_dir": "r"}},
}
WORDS = ("standard", "strict")
CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("*.json"))
OWN: tuple[dict[str, Any], ...] = (
    {"determinism.enabled": False},
    {"determinism.enabled": True, "audit.enabled": False},
    {"audit.enabled": False, "sdc.always_on.enabled": False},
    {"audit.enabled": False, "sdc.always_on.enabled": False, "sdc.golden": "g.jsonl"},
    {"audit.interval": 5000},
    {"audit.micro_batch": "training"},
    {"audit.permuted": True},
    {"audit.verify_checkpoints": False, "checkpoint.interval": 10},
    {"audit.verify_checkpoints": True, "checkpoint.interval": 10, "checkpoint.require_verified": "always"},
    {"sdc.always_on.enabled": False},
    {"sdc.always_on.coverage": "all"},
    {"sdc.always_on.slice_elements": 7, "sdc.always_on.rows": False},
    {
        "sdc.always_on.parameters": False,
        "sdc.always_on.finite": False,
        "sdc.always_on.tokens": False,
        "sdc.always_on.rows": False,
        "sdc.always_on.slice_elements": None,
    },
    {"sdc.budget": 0.5},
    {"sdc.policy.persistent": "warn"},
    {
        "sdc.policy.persistent": "isolate",
        "checkpoint.memory.interval": 1,
        "checkpoint.memory.partners": True,
        "checkpoint.other_layout": "convert",
    },
    {"checkpoint.memory.interval": 0},
    {"checkpoint.memory.partners": False, "checkpoint.storage": "node_local"},
    {"checkpoint.writing": "sync", "checkpoint.interval": 3},
    {"health.enabled": False},
    {"sdc.golden": "g.jsonl", "sdc.golden_interval": 10},
    {"drop_compute.enabled": True, "drop_compute.threshold": 1.0},
    {"parallel.threads": 0},
    {"model.megatron": {"deterministic_mode": False}},
    {"optimizer_hooks": [{"hook": "absolute_bound", "limit": 1.0}]},
    {"optimizer_hooks": [{"hook": "momentum_reset", "interval": 50}]},
    {"faults": [{"submodule": "*.mlp.linear_fc1", "rank": 0, "steps": [2, 2]}]},
    {"study.mode": "computation_sync", "study.replicas": 2, "determinism.enabled": True},
    {"study.mode": "free_run", "study.replicas": 2, "determinism.enabled": True, "training.eval_interval": 5},
)
DEEPSPEED: tuple[dict[str, Any], ...] = (
    {},
    {"bf16": {"enabled": True}},
    {"fp16": {"enabled": True}},
    {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": False}}},
    {"pipeline": {"activation_checkpoint_interval": 1}},
    {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
)
LAYOUTS = ((1, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 2), (2, 2, 1))


def build(own: dict[str, Any] | None = None, overrides: tuple[str, ...] = (), **deepspeed: Any) -> RunConfig:
    """A configuration with these fields, by path below `megasdc`."""
    raw = copy.deepcopy(BASE) | deepspeed
    for path, value in (own or {}).items():
        *names, last = path.split(".")
        at = raw["megasdc"]
        for name in names:
            at = at.setdefault(name, {})
        at[last] = value
    return parse_config(raw, overrides)


def changed(config: RunConfig, plain: RunConfig) -> dict[str, Any]:
    """Values of a configuration that are not those of another one, by path."""

    def flat(value: Any, at: str) -> dict[str, Any]:
        if isinstance(value, dict):
            return {name: one for key, inner in value.items() for name, one in flat(inner, f"{at}{key}.").items()}
        return {at[:-1]: value}

    before, after = flat(plain.resolved(), ""), flat(config.resolved(), "")
    return {path: value for path, value in after.items() if value != before.get(path)}


STANDARD = {
    "determinism.enabled": True,
    "audit.enabled": True,
    "audit.micro_batch": "extra",
    "audit.longest_interval": 1000,
    "audit.verify_checkpoints": True,
    "audit.permuted": None,
    "sdc.always_on.enabled": True,
    "sdc.always_on.rows": True,
    "sdc.always_on.slice_elements": 16384,
    "checkpoint.memory.interval": 10,
    "checkpoint.memory.partners": None,
    "checkpoint.memory.without_room": "go_on",
}


def test_each_word_adds_what_it_promises_and_off_nothing() -> None:
    """The fields of a file that gives none; a strict run halts after everything; DeepSpeed's keys stay."""
    plain = build({"protect": "off"})
    assert build() == build({"protect": "standard"}), "the default of a new run"
    repairs = {f"sdc.policy.{name}": "repair" for name in ("persistent", "intermittent", "inconclusive")}
    for word, policies in (("standard", repairs), ("strict", {"sdc.policy.not_reproduced": "halt"})):
        found = changed(build({"protect": word}), plain)
        assert found == {f"megasdc.{path}": one for path, one in {"protect": word, **STANDARD, **policies}.items()}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_no_word_makes_an_example_wrong(path: Path) -> None:
    """Every file in configs/ is accepted with each word, without a new warning; its resolved file is equal to it."""
    plain = load_config(path, ["megasdc.protect=off"])
    for word in WORDS:
        config = load_config(path, [f"megasdc.protect={word}"])
        assert find_warnings(config) == find_warnings(plain)
        assert parse_config(config.resolved()) == config == parse_config(config.resolved(), stored=True)
        assert config.deepspeed == plain.deepspeed and config.megasdc.model == plain.megasdc.model


def outcome(own: dict[str, Any], deepspeed: dict[str, Any]) -> tuple[RunConfig | None, set[str]]:
    """A configuration with its warnings, or None with its problems."""
    try:
        config = build(own, **deepspeed)
    except ConfigError as error:
        return None, set(error.problems)
    return config, set(find_warnings(config))


@pytest.mark.slow
@pytest.mark.parametrize("deepspeed", DEEPSPEED, ids=lambda one: next(iter(one), "plain"))
def test_what_the_user_sets_wins_and_nothing_is_contradicted(deepspeed: dict[str, Any]) -> None:
    """With own settings of every kind and both words: the values are the user's, there is no problem or warning that
    the file does not have with `off`, and every layout fits that fits then.
    """
    for own, word in itertools.product((*OWN, {}), WORDS if not deepspeed else WORDS[:1]):
        plain, said = outcome({**own, "protect": "off"}, deepspeed)
        config, told = outcome({**own, "protect": word}, deepspeed)
        if config is None:
            assert plain is None, (own, told)
            theirs = tuple(f"megasdc.{path}: " for path in own)
            assert all(text in said or text.startswith(theirs) for text in told), (own, told)
            continue
        assert plain is None or told <= said, (own, told)
        for path, value in own.items():
            got = value_of(config.megasdc, path)
            assert got == value or isinstance(value, list), (own, path)
        for tensor, pipeline, replicas in LAYOUTS:
            layout = {"parallel.tensor": tensor, "parallel.pipeline": pipeline}
            fits = tensor == pipeline == 1 or (own, word) == ({}, "standard")
            if fits and "isolate" not in own.values() and not own.get("drop_compute.enabled"):
                one = config if tensor == pipeline == 1 else build({**own, **layout, "protect": word}, **deepspeed)
                check_layout(one, tensor * pipeline * replicas * (own.get("study.replicas") or 1))
                lines = start_lines(one.megasdc, one.deepspeed, replicas)
                assert len(lines) >= 3 and "not covered" in lines[2]
        assert parse_config(config.resolved()) == config


@pytest.mark.parametrize(
    ("own", "deepspeed", "text"),
    [
        ({"parallel.threads": 0}, {}, "wrong results (parallel.threads is 0; needed: a number of threads)"),
        ({"determinism.enabled": False}, {}, "wrong results (determinism.enabled is false; needed: true)"),
        (
            {},
            {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": False}}},
            "sums over replicas and updates (optimizer.params.torch_adam is false; needed: true)",
        ),
        ({}, {}, "nothing is recomputed; needed: pipeline.activation_checkpoint_interval"),
        ({}, {}, "there is no golden trace; needed: sdc.golden"),
        ({}, {}, "checkpoints while training (checkpoint.interval is 0"),
        ({"audit.enabled": False}, {}, "backward faults outside of looks (audit.enabled is false"),
        ({"study.mode": "free_run", "study.replicas": 2, "determinism.enabled": True}, {}, "everything (study.mode"),
        (
            {},
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
            "the gradient's norm (the optimizer's state is offloaded",
        ),
    ],
)
def test_what_is_forbidden_is_named_with_what_it_would_need(own, deepspeed, text) -> None:
    """Each thing that a file forbids is in the line of what is not covered."""
    own = {"training.eval_interval": 5, **own} if "study.mode" in own else own
    config = build({"protect": "standard", **own}, **deepspeed)
    assert text in start_lines(config.megasdc, config.deepspeed)[2]


def test_another_backend_keeps_what_needs_no_submodules(monkeypatch: pytest.MonkeyPatch) -> None:
    """With Transformer Engine nothing is compared, and memory and health stay; the backend is not changed."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: object())
    own = {"model.backend": "transformer_engine", "model.attention_dropout": 0.0}
    config = build({"protect": "standard", **own})
    sections = config.megasdc
    assert sections.model.backend == "transformer_engine" and sections.checkpoint.memory.interval == 10
    assert not (sections.audit.enabled or sections.sdc.always_on.enabled or sections.determinism.enabled)
    assert 'model.backend is "transformer_engine"' in start_lines(sections, config.deepspeed)[2]


def test_differences_are_printed_with_both_values() -> None:
    """Values of the user's own that are not the preset's, and nothing that only follows from one of them."""
    own = {"audit.enabled": False, "sdc.always_on.slice_elements": 100, "health.enabled": False}
    config = build({"protect": "standard", **own, "audit.interval": 50})
    *_, told = start_lines(config.megasdc, config.deepspeed)
    assert told == (
        "protect standard, set in another way by you: health.enabled false (preset: null); audit.enabled false "
        "(preset: true); sdc.always_on.slice_elements 100 (preset: 16384)"
    )
    assert len(start_lines(build({"protect": "standard"}).megasdc, config.deepspeed)) == 3


def test_an_override_turns_the_word_and_its_parts_off() -> None:
    """`--set megasdc.protect=off` is the file without the word, what needed its fields reset with a warning; a part
    that is turned off takes with it what the preset added to it.
    """
    own = {"protect": "standard", "checkpoint.interval": 5, "audit.verify_checkpoints": True}
    config = build(own, ("megasdc.protect=off",))
    assert config == build({"protect": "off", "checkpoint.interval": 5})
    assert "megasdc.audit.verify_checkpoints: true of the file is not used" in config.reset[0]
    config = build(own, ("megasdc.audit.enabled=false",))
    assert not config.megasdc.audit.enabled and config.megasdc.audit.micro_batch == "training"
    assert config.megasdc.sdc.always_on.rows


def test_wrong_values_are_reported_as_without_the_word() -> None:
    """An unknown word names the three; other problems of a file are reported beside it."""
    with pytest.raises(ConfigError) as caught:
        build({"protect": "high", "audit.interval": "often"})
    texts = "\n".join(caught.value.problems)
    assert 'megasdc.protect: got "high"; allowed: "off" or "standard" or "strict"' in texts
    assert 'megasdc.audit.interval: got "often"' in texts
    with pytest.raises(ConfigError) as caught:
        build({"protect": "standard", "audit": 3})
    assert "megasdc.audit: got 3" in str(caught.value)


def test_a_stored_configuration_without_the_word_is_off() -> None:
    """A run that was begun without the word goes on without it, whatever the default is."""
    raw = build({"protect": "off", "audit.interval": 7}).resolved()
    del raw["megasdc"]["protect"]
    assert parse_config(raw, stored=True) == build({"protect": "off", "audit.interval": 7})


@pytest.mark.parametrize(
    ("kept", "word"),
    [
        (None, "standard"),
        ('{"megasdc": {"audit": {"enabled": false}}}', "off"),
        ('{"megasdc": {"protect": "off"}}', "off"),
        ('{"megasdc": {"protect": "strict"}}', "strict"),
        ('{"megasdc": {"protect": "standard"}}', "standard"),
        ('{"megasdc": {"protect": 3}}', "off"),
        ("{", "off"),
        ("[]", "off"),
    ],
)
def test_a_file_without_the_word_goes_on_as_its_run_began(tmp_path: Path, kept: str | None, word: str) -> None:
    """The folder of a run keeps its word, which is off where it is older than the word or its record is damaged; a
    word of the file or of an override wins, and a field that an override turns off is told against this word.
    """
    own = {"logging.run_dir": str(tmp_path), "checkpoint.interval": 5}
    if kept is not None:
        (tmp_path / "resolved.json").write_text(kept)
    assert build(own) == build({**own, "protect": word})
    for given in ("off", "strict"):
        assert build(own, (f"megasdc.protect={given}",)) == build({**own, "protect": given})
    config = build(own, ("megasdc.audit.enabled=false",))
    assert config == build({**own, "protect": word}, ("megasdc.audit.enabled=false",))
    assert config.reset == build({**own, "protect": word}, ("megasdc.audit.enabled=false",)).reset


def test_audits_of_one_replica_are_permuted_and_partners_need_hosts() -> None:
    """Null is one replica's own check; the same file fits one replica and two."""
    config = build({"protect": "standard"})
    assert [check_layout(config, ranks).data for ranks in (1, 2)] == [1, 2]
    assert [config.megasdc.audit.permutes(replicas) for replicas in (1, 2)] == [True, False]
    told = [start_lines(config.megasdc, config.deepspeed, 2, hosts) for hosts in (1, 2)]
    assert "the loss of the host's memory (there is one host" in told[0][2]
    assert "one host" not in told[1][2] and "and of another host" in told[1][0]


def test_all_of_it_is_json() -> None:
    """The resolved file can be written and read again."""
    assert json.loads(json.dumps(build({"protect": "strict"}).resolved()))["megasdc"]["protect"] == "strict"
