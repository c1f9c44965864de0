"""The lists of DeepSpeed's keys are those of the installed DeepSpeed, found by watching it read a configuration."""

import inspect
from importlib.metadata import version
from pathlib import Path

import pytest

from megasdc.config import deepspeed as ours
from megasdc.config.deepspeed import REFUSED_KEYS, SCHEDULER_PARAMS, UNSUPPORTED_KEYS
from megasdc.config.load import parse_config

ds_config = pytest.importorskip("deepspeed.runtime.config")

PINS = (Path(__file__).parents[3] / "launch" / "constraints.txt").read_text(encoding="utf-8")
newest_only = pytest.mark.skipif(
    f"deepspeed=={version('deepspeed')}\n" not in PINS, reason="the lists are those of the pinned DeepSpeed"
)

MINIMAL = {
    "megasdc": {"data": {"path": "x"}, "protect": "off", "training": {"steps": 100}, "logging": {"run_dir": "r"}}
}


class _WatchedKeys:
    def __init__(self, watched):
        self.watched = watched

    def __contains__(self, key):
        return key in self.watched

    def __iter__(self):
        return dict.__iter__(self.watched)


class _Watched(dict):
    """A dict that notes which keys are asked for."""

    asked: set[str] = set()

    def __contains__(self, key):
        self.asked.add(key)
        return super().__contains__(key)

    def __getitem__(self, key):
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key, default=None):
        self.asked.add(key)
        return super().get(key, default)

    def keys(self):
        return _WatchedKeys(self)


@newest_only
def test_known_keys_are_those_that_deepspeed_reads():
    """DeepSpeed's parser asks for exactly the top-level keys supported or refused: none is ignored silently."""
    ds_config.DeepSpeedConfig(_Watched({"train_batch_size": 1}))
    known = set(ours.DeepSpeedPart.model_fields) | set(UNSUPPORTED_KEYS)
    assert _Watched.asked - known == set(), "DeepSpeed reads keys that are neither supported nor refused"
    assert known - _Watched.asked == set(), "keys that DeepSpeed does not read"


def test_no_key_is_both_supported_and_refused():
    """A key of the top level is in one of the two lists."""
    assert not set(ours.DeepSpeedPart.model_fields) & set(UNSUPPORTED_KEYS)


@newest_only
def test_removed_features_are_refused():
    """Keys that DeepSpeed itself refuses are refused here, with all other problems."""
    assert set(ds_config._REMOVED_TOP_LEVEL_CONFIG_KEYS) <= set(UNSUPPORTED_KEYS)


def _names(model):
    return set(model.model_fields) | {info.alias for info in model.model_fields.values() if info.alias}


def _section_pairs():
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.monitor import config as monitor
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    return {
        "zero_optimization": (ours.Zero, DeepSpeedZeroConfig),
        "zero_optimization.offload_optimizer": (ours.OffloadOptimizer, DeepSpeedZeroOffloadOptimizerConfig),
        "bf16": (ours.Bf16, DeepSpeedBF16Config),
        "fp16": (ours.Fp16, DeepSpeedFP16Config),
        "tensorboard": (ours.TensorBoard, monitor.TensorBoardConfig),
        "csv_monitor": (ours.TensorBoard, monitor.CSVConfig),
        "wandb": (ours.Wandb, monitor.WandbConfig),
        "comet": (ours.Comet, monitor.CometConfig),
        "comms_logger": (ours.CommsLogger, CommsLoggerConfig),
        "timers.throughput": (ours.ThroughputTimer, DeepSpeedThroughputTimerConfig),
    }


@newest_only
@pytest.mark.parametrize("section", sorted(_section_pairs()))
def test_sections_have_deepspeeds_fields(section):
    """A section's keys, taken with those refused by name, are the fields of DeepSpeed's class."""
    mine, theirs = _section_pairs()[section]
    refused = {path.removeprefix(f"{section}.") for path in REFUSED_KEYS if path.startswith(f"{section}.")}
    assert set(mine.model_fields) <= _names(theirs)
    assert _names(theirs) - set(mine.model_fields) - refused == set()


@newest_only
@pytest.mark.parametrize(
    "section",
    ["bf16", "fp16", "tensorboard", "comms_logger", "zero_optimization", "zero_optimization.offload_optimizer"],
)
def test_defaults_that_are_shown_are_deepspeeds(section):
    """Simple defaults of a section equal DeepSpeed's, so that messages do not promise another value."""
    mine, theirs = _section_pairs()[section]
    for name, info in mine.model_fields.items():
        if name != "stage" and info.default_factory is None:
            assert info.default == theirs.model_fields[name].default, name


def test_aio_has_deepspeeds_fields_and_defaults():
    """DeepSpeed has no class for this section; its default dict names the keys."""
    from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT

    assert ours.Aio.model_validate({}).model_dump() == AIO_DEFAULT_DICT


def test_activation_checkpointing_has_deepspeeds_fields():
    """DeepSpeed has no class for this section; its default dict names the keys."""
    from deepspeed.runtime.activation_checkpointing.config import ACT_CHKPT_DEFAULT

    assert set(ours.ActivationCheckpointing.model_fields) == set(ACT_CHKPT_DEFAULT)


def test_pipeline_keys_are_those_with_defaults_in_deepspeed():
    """The pipeline section, with the keys that have a name of their own here, is DeepSpeed's plus use_reentrant."""
    refused = {path.removeprefix("pipeline.") for path in REFUSED_KEYS if path.startswith("pipeline.")}
    assert set(ours.Pipeline.model_fields) | refused == set(ds_config.get_pipeline_config({})) | {"use_reentrant"}


@pytest.mark.parametrize("kind", SCHEDULER_PARAMS)
def test_schedules_take_their_arguments(kind):
    """The arguments of a schedule are those of DeepSpeed's class, and the filled-in set is enough to build it."""
    import torch
    from deepspeed.runtime import lr_schedules

    schedule = getattr(lr_schedules, kind)
    arguments = set(inspect.signature(schedule).parameters) - {"optimizer", "last_batch_iteration"}
    assert arguments == SCHEDULER_PARAMS[kind]
    part = parse_config({**MINIMAL, "scheduler": {"type": kind}}).deepspeed
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=part["optimizer"]["params"]["lr"])
    built = schedule(optimizer, **part["scheduler"]["params"])
    rates = []
    for _ in range(100):
        built.step()
        rates.append(built.get_last_lr()[0])
    assert max(rates) == pytest.approx(3e-4, rel=1e-3)
    last = {"WarmupLR": 3e-4, "WarmupDecayLR": 0.0, "WarmupCosineLR": 3e-5}[kind]
    assert rates[-1] == pytest.approx(last, abs=1e-5)


@pytest.mark.parametrize(
    "deepspeed",
    [{}, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}, {"optimizer": {"params": {"foreach": True}}}],
)
def test_filled_part_is_accepted_by_deepspeed_and_pytorch(deepspeed):
    """DeepSpeed parses the completed dict, and PyTorch's AdamW takes the optimizer arguments that remain."""
    import torch

    part = parse_config({**MINIMAL, **deepspeed}).deepspeed
    parsed = ds_config.DeepSpeedConfig(dict(part))
    assert parsed.zero_optimization_stage == 1
    assert parsed.gradient_clipping == 1.0
    assert parsed.grad_accum_dtype == ("fp32" if "bf16" in deepspeed else "fp16" if "fp16" in deepspeed else None)
    params = dict(part["optimizer"]["params"])
    assert params.pop("torch_adam") is True
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], **params)
