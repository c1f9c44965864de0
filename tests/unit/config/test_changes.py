"""Which fields of the configuration may be changed at a resume: every field says it, and starts are judged by it."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from megasdc.common.errors import ConfigError
from megasdc.config.changes import ChangedField, explain_refusal, find_changes, may_change
from megasdc.config.fields import AtResume, Section, at_resume_of, field_rows
from megasdc.config.load import RunConfig, WholeFile, load_config, parse_config

FILE: dict[str, Any] = {
    "train_batch_size": 8,
    "megasdc": {"data": {"path": "d"}, "protect": "off", "training": {"steps": 10}, "logging": {"run_dir": "r"}},
}


def _changed(*overrides: str, file: dict[str, Any] = FILE, data: int = 2) -> dict[str, tuple[Any, Any, str]]:
    """What differs between the file and the file with overrides, by path."""
    found = find_changes(parse_config(file).resolved(), parse_config(file, overrides), 2, data)
    return {change.path: (change.old, change.new, change.at_resume) for change in found}


def test_every_field_says_what_a_resume_makes_of_it() -> None:
    """No field, ours or DeepSpeed's, is without a class; a section or field that states none is an error."""
    kinds = {path: at_resume for path, _, at_resume in field_rows(WholeFile, "")}
    assert len(kinds) > 300
    assert set(kinds.values()) == set(get_args(AtResume))

    class Silent(Section):
        field: int = 1

    with pytest.raises(ValueError, match="Silent"):
        at_resume_of(Silent, Silent.model_fields["field"])


def test_fields_named_by_the_promise() -> None:
    """Spot checks: what changes the model, the order of data, the rates, or nothing."""
    kinds = {path: at_resume for path, _, at_resume in field_rows(WholeFile, "")}
    expected = {
        "megasdc.model.num_attention_heads": "refused",
        "megasdc.training.seed": "universal",
        "megasdc.data.seed": "universal",
        "megasdc.model.hidden_dropout": "flag",
        "megasdc.model.norm_epsilon": "flag",
        "train_batch_size": "flag",
        "optimizer.params.lr": "applied",
        "optimizer.params.betas": "applied",
        "optimizer.params.weight_decay": "applied",
        "gradient_clipping": "applied",
        "megasdc.audit.interval": "applied",
        "megasdc.optimizer_hooks[].theta": "applied",
        "megasdc.training.stop_step": "-",
        "megasdc.checkpoint.resume": "-",
        "megasdc.logging.interval": "-",
    }
    assert expected.items() <= kinds.items()


def test_an_unchanged_file_has_no_changes() -> None:
    """Defaults that are written out, derived widths and batch sizes, and fields of no matter are no changes."""
    assert _changed() == {}
    same = ["megasdc.model.kv_channels=32", "megasdc.model.ffn_hidden_size=512", "megasdc.model.num_query_groups=4"]
    same += ["megasdc.training.stop_step=4", "megasdc.checkpoint.resume=must", "megasdc.logging.run_dir=other"]
    same += ["fp16.enabled=false", "zero_optimization.overlap_comm=null", "gradient_accumulation_steps=4"]
    assert _changed(*same) == {}


@pytest.mark.parametrize(
    ("override", "path", "change"),
    [
        ("megasdc.model.num_attention_heads=8", "megasdc.model.num_attention_heads", (4, 8, "refused")),
        ("megasdc.model.kv_channels=16", "megasdc.model.kv_channels", (32, 16, "refused")),
        ("optimizer.params.betas=[0.9,0.99]", "optimizer.params.betas", ([0.9, 0.95], [0.9, 0.99], "applied")),
        ("megasdc.data.split=[8,1,1]", "megasdc.data.split", ([98, 1, 1], [8, 1, 1], "flag")),
        ("megasdc.sdc.repeats=3", "megasdc.sdc.repeats", (5, 3, "applied")),
    ],
)
def test_a_changed_field_is_found(override: str, path: str, change: tuple[Any, Any, str]) -> None:
    """One changed field is one change, with both values and its class."""
    assert _changed(override) == {path: change}


def test_what_follows_from_a_change_is_found_too() -> None:
    """A schedule that follows the steps, and micro-batches that follow from another size of them."""
    assert _changed("megasdc.training.steps=40").keys() == {
        "megasdc.training.steps",
        "scheduler.params.total_num_steps",
        "scheduler.params.warmup_num_steps",
    }
    assert _changed("train_micro_batch_size_per_gpu=2") == {
        "train_micro_batch_size_per_gpu": (1, 2, "applied"),
        "gradient_accumulation_steps": (4, 2, "applied"),
    }
    assert _changed(data=4) == {"gradient_accumulation_steps": (4, 2, "applied")}


def test_entries_of_lists_are_compared_one_by_one() -> None:
    """A changed entry is found at its place; another number of entries is a change of the list."""
    hooks = [{"hook": "absolute", "theta": 1.0}, {"hook": "momentum_reset"}]
    file = {**FILE, "megasdc": {**FILE["megasdc"], "optimizer_hooks": hooks}}
    assert _changed("megasdc.optimizer_hooks.0.theta=2.0", file=file) == {
        "megasdc.optimizer_hooks.0.theta": (1.0, 2.0, "applied")
    }
    (path,) = _changed("megasdc.optimizer_hooks=[]", file=file)
    assert path == "megasdc.optimizer_hooks"


def test_files_of_other_versions_are_compared() -> None:
    """A field that the saved file lacks has its default; one that nothing knows any more is told."""
    saved = parse_config(FILE).resolved()
    del saved["megasdc"]["model"]["norm_epsilon"], saved["megasdc"]["audit"], saved["optimizer"]["params"]["eps"]
    saved["megasdc"]["model"]["gone"] = 3
    found = find_changes(saved, parse_config(FILE, ["megasdc.audit.interval=7"]), 2, 2)
    assert [str(change) for change in found] == [
        "megasdc.model.gone: saved with 3, now null",
        "megasdc.audit.interval: saved with 50, now 7",
    ]


@pytest.mark.parametrize(
    ("kind", "at_resume", "flagged", "from_universal"),
    [
        ("refused", False, False, False),
        ("universal", False, False, True),
        ("flag", False, True, True),
        ("applied", True, True, True),
    ],
)
def test_which_changes_let_a_run_go_on(kind: AtResume, at_resume: bool, flagged: bool, from_universal: bool) -> None:
    """By class: at a resume, with the flag for the field, and from a universal checkpoint."""
    change = ChangedField("megasdc.model.megatron", {}, {"qk_layernorm": True}, kind)
    assert may_change(change, (), universal=False) is at_resume
    assert may_change(change, ("megasdc.model.megatron",), universal=False) is flagged
    assert may_change(change, ("megasdc.model.backend", "megasdc.model.mega"), universal=False) is at_resume
    assert may_change(change, (), universal=True) is from_universal


def test_a_refusal_names_all_fields_and_their_remedies() -> None:
    """Both values of each field, the flags to give, and the way by a universal checkpoint."""
    changes = [ChangedField("train_batch_size", 8, 16, "flag"), ChangedField("megasdc.data.seed", 1, 2, "universal")]
    text = explain_refusal(changes)
    assert "train_batch_size: saved with 8, now 16" in text
    assert "new values of the others, once megasdc.data.seed are as saved, anyway" not in text
    assert "once megasdc.data.seed are as saved anyway, add --allow-changed train_batch_size" in text
    assert "another megasdc.data.seed from a universal checkpoint" in text


def _loaded(tmp_path: Any, *allow: str) -> RunConfig:
    import json

    (tmp_path / "c.json").write_text(json.dumps(FILE), encoding="utf-8")
    return load_config(tmp_path / "c.json", allow_changed=allow)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("hidden_dropout", "did you mean megasdc.model.hidden_dropout"),
        ("megasdc.model", "is a section"),
        ("nothing.like.it", "is no field"),
        ("megasdc.model.num_layers", "no run can resume"),
        ("megasdc.training.seed", "no run can resume"),
    ],
)
def test_flags_without_meaning_are_refused(tmp_path: Any, name: str, answer: str) -> None:
    """--allow-changed with no field, a section, or a field that is never taken up changed, is a bad configuration."""
    with pytest.raises(ConfigError, match=answer):
        _loaded(tmp_path, name)


def test_flags_are_kept(tmp_path: Any) -> None:
    """--allow-changed is no part of the file, and may name what acts anyway."""
    names = ("megasdc.model.hidden_dropout", "optimizer.params.lr", "megasdc.optimizer_hooks.0.theta")
    config = _loaded(tmp_path, *names)
    assert config.allow_changed == names
    assert config == _loaded(tmp_path)
