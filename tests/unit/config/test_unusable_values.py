"""What no run can use is refused when the file is checked, at its place, not by a traceback in a rank."""

import copy
import importlib
import json

import pytest

from megasdc.attached.settings import load_settings
from megasdc.common.errors import ConfigError
from megasdc.common.imports import is_installed
from megasdc.config.checks import check_layout
from megasdc.config.load import load_config, parse_config

MINIMAL = {
    "megasdc": {"data": {"path": "x"}, "protect": "off", "training": {"steps": 100}, "logging": {"run_dir": "r"}}
}

WITHOUT_WANDB = pytest.mark.skipif(is_installed("wandb"), reason="wandb is installed")


def problems_of(raw, overrides=()):
    with pytest.raises(ConfigError) as caught:
        parse_config(raw, overrides)
    return caught.value.problems


@pytest.mark.parametrize(
    ("written", "line", "column", "reason"),
    [
        ("NaN", 2, 9, "NaN is not a JSON value"),
        ("-Infinity", 2, 9, "-Infinity is not a JSON value"),
        ("1e400", 2, 9, "1e400 is larger than every floating-point number"),
        ("9" * 5000, 2, 9, "has 5000 digits; allowed are 400"),
    ],
)
def test_a_number_that_does_not_exist_is_blamed_where_it_stands(tmp_path, written, line, column, reason):
    """NaN, infinities and numbers without end are refused with their own line and column, not those of a text."""
    file = tmp_path / "c.json"
    file.write_text(f'{{"a{written[:20]}": 1,\n  "lr": {written}\n}}')
    with pytest.raises(ConfigError, match=f"line {line}, column {column}: .*{reason}"):
        load_config(file)


@pytest.mark.parametrize("depth", [200, 900, 100_000])
def test_deep_nesting_is_refused(tmp_path, depth):
    """A file or an override that nests without end gives one problem."""
    text = "[" * depth + "]" * depth
    (tmp_path / "c.json").write_text(f'{{"a": {text}}}')
    with pytest.raises(ConfigError, match="more than 100 deep"):
        load_config(tmp_path / "c.json")
    assert "more than 100 deep" in problems_of(MINIMAL, [f"megasdc.training.steps={text}"])[0]


@pytest.mark.parametrize(
    ("path", "value", "parts"),
    [
        ("megasdc.logging.run_dir", "a\0b", ["NUL"]),
        ("megasdc.data.path", "a\ud800b", ["surrogate"]),
        ("megasdc.model.initial_weights", "\0", ["NUL"]),
        ("megasdc.optimizer_hooks", [{"hook": "file", "path": "a\0", "name": "x"}], ["optimizer_hooks.0.path", "NUL"]),
        ("megasdc.model.hidden_size", 10**30, ["allowed: integer > 0", f"up to {2**53}"]),
        ("megasdc.model.num_layers", 300_000_000, ["integer > 0 and <= 10000"]),
        ("megasdc.parallel.threads", 100_000, ["<= 1024"]),
        ("megasdc.parallel.timeout_s", 1e-4, [">= 1"]),
        ("megasdc.parallel.timeout_s", 9.3e9, ["<= 1000000000"]),
        ("megasdc.parallel.timeout_s", 1e308, ["<= 1000000000"]),
        ("zero_optimization.offload_optimizer", {"device": "nvme"}, ['"none" or "cpu"', "ZeRO stage 3"]),
        ("zero_optimization.offload_optimizer", {"devise": "cpu"}, ["did you mean", "offload_optimizer.device"]),
        ("aio", {"block_sise": 1}, ["did you mean aio.block_size?"]),
        ("aio.use_gds", True, ["allowed: false"]),
        ("fp16.initial_scale_power", 128, ["<= 127"]),
        pytest.param(
            *("wandb.enabled", True, ["package wandb is not installed", "pip install wandb"]), marks=WITHOUT_WANDB
        ),
        ("comet.enabled", True, ["package comet_ml is not installed"]),
        ("megasdc.model.megatron", {"qk_layernorm": 1}, ["allowed: true or false"]),
        ("megasdc.model.megatron", {"softmax_scale": "x"}, ["allowed: number or null"]),
        ("zero_optimization.offload_optimizer", {"ratio": 0.5}, ["offload_optimizer.ratio", "only ZeRO stage 3"]),
        ("zero_optimization.allgather_bucket_size", 3, ["got 3", "an even number"]),
        ("checkpoint.checkpoint_serialization", False, ["allowed: true", "megasdc does not verify"]),
        ("scheduler", {"type": "WarmupLR", "params": {"warmup_max_lr": [1]}}, ["warmup_max_lr", "list of 2"]),
        ("scheduler", {"type": "WarmupLR", "params": {"warmup_min_lr": []}}, ["warmup_min_lr", "list of 2"]),
        ("megasdc.model", {"gated_mlp": True, "megatron": {"activation_func_clamp_value": 1e39}}, ["<= 3.40282"]),
        ("megasdc.model", {"gated_mlp": True, "megatron": {"glu_linear_offset": -1e39}}, [">= -3.40282"]),
    ],
)
def test_what_ranks_cannot_use_is_refused(path, value, parts):
    """Texts that are no file names, endless sizes and times, what is not installed: one problem names the field."""
    raw = copy.deepcopy(MINIMAL)
    *parents, last = path.split(".")
    at = raw
    for key in parents:
        at = at.setdefault(key, {})
    at[last] = value
    (problem,) = problems_of(raw)
    assert problem.startswith(path)
    assert all(part in problem for part in parts), problem


@pytest.mark.parametrize("name", [pytest.param("wandb", marks=WITHOUT_WANDB), "comet_ml"])
def test_a_monitor_that_is_installed_is_accepted(tmp_path, monkeypatch, name):
    """A package that can be imported passes; a mere folder of its name, such as logs leave, is none."""
    section = {"wandb": "wandb", "comet_ml": "comet"}[name]
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / name).mkdir()
    assert "not installed" in problems_of({**MINIMAL, section: {"enabled": True}})[0]
    (tmp_path / name / "__init__.py").write_text("")
    importlib.invalidate_caches()
    assert parse_config({**MINIMAL, section: {"enabled": True}}).deepspeed[section]["enabled"]


def test_more_samples_than_can_be_numbered_are_refused():
    """Steps times batch size stays below the integers that every file and index keeps."""
    config = parse_config(MINIMAL, [f"megasdc.training.steps={2**53}", "megasdc.training.stop_step=1"])
    check_layout(config, 1)
    with pytest.raises(ConfigError, match=rf"training\.steps: got {2**53} of 2 samples each"):
        check_layout(config, 2)


_IN_BF16 = {
    "bf16": {"enabled": True, "bf16_master_weights_and_grads": True},
    "data_types": {"grad_accum_dtype": "bf16"},
}
_ON_HOST = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}


def test_master_weights_in_16_bits_need_deepspeeds_cpu_adam():
    """Without offload and compiled Adam DeepSpeed asserts; with both, or with the moments in 16 bits too, it trains."""
    for deepspeed in (_IN_BF16, {**_IN_BF16, **_ON_HOST}):
        (problem,) = problems_of({**MINIMAL, **deepspeed})
        assert problem.startswith("bf16.bf16_master_weights_and_grads: got true")
    compiled = {"optimizer": {"params": {"torch_adam": False}}}
    parse_config({**MINIMAL, **_IN_BF16, **_ON_HOST, **compiled})
    parse_config({**MINIMAL, **_IN_BF16, "bf16": {**_IN_BF16["bf16"], "bf16_optimizer_states": True}})
    in_fp16 = {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}
    (problem,) = problems_of({**MINIMAL, **in_fp16})
    assert problem.startswith("fp16.fp16_master_weights_and_grads: got true")
    parse_config({**MINIMAL, **in_fp16, **_ON_HOST, **compiled})


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("megasdc.logging.run_dir", "~/runs/x"),
        ("megasdc.data.path", "~"),
        ("megasdc.checkpoint.folder", "~else/x"),
        ("tensorboard.output_path", "~/board"),
    ],
)
def test_a_home_folder_as_shells_write_it_is_refused(monkeypatch, path, text):
    """It would be a folder of the name `~`; the message has the path that is meant, and that of a folder so named."""
    monkeypatch.setenv("HOME", "/home/me")
    value = json.dumps(text)
    (problem,) = [one for one in problems_of(MINIMAL, [f"{path}={value}"]) if one.startswith(f"{path}:")]
    meant = json.dumps(text.replace("~", "/home/me")) if "else" not in text else "the whole path"
    assert f"got {value}" in problem and f"write {meant}, or " in problem and f'"./{text}"' in problem
    assert parse_config(MINIMAL, ["megasdc.logging.run_dir=./~/runs", "megasdc.data.path=a~/b"])
    stored = parse_config(MINIMAL, ["megasdc.logging.run_dir=r"]).resolved()
    stored["megasdc"]["logging"]["run_dir"] = "~/runs"  # as earlier versions have made it
    assert parse_config(stored, stored=True).megasdc.logging.run_dir == "~/runs"


def test_a_guard_has_no_home_folder_as_shells_write_it_either():
    """Nor the program of its alert command, which no shell reads; what follows may be a shell's."""
    given = {"logging": {"run_dir": "~/runs/x"}, "health": {"alert_command": ["~/bin/alert", "~/x"]}}
    with pytest.raises(ConfigError) as caught:
        load_settings(given)
    assert [one.partition(":")[0] for one in caught.value.problems] == ["logging.run_dir", "health.alert_command.0"]
