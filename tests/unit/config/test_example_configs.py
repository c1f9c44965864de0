"""Every file in configs/ is complete, valid, and fits the number of ranks it is meant for."""

import json
from pathlib import Path

import pytest

from megasdc.config.changes import find_changes
from megasdc.config.checks import check_layout, find_warnings
from megasdc.config.load import load_config, parse_config

FOLDER = Path(__file__).parents[3] / "configs"
RANKS = {
    "smoke": (2, (1, 1, 2)),
    "archived": (2, (1, 1, 2)),
    "blend": (2, (1, 1, 2)),
    "bounded": (2, (1, 1, 2)),
    "drill": (2, (1, 1, 2)),
    "delays": (2, (1, 1, 2)),
    "drop_compute": (2, (1, 1, 2)),
    "drop_backward": (2, (1, 1, 2)),
    "local_sgd": (1, (1, 1, 1)),
    "study_computation_sync": (2, (1, 1, 1)),
    "audited": (3, (1, 1, 3)),
    "supervised": (3, (1, 1, 3)),
    "smoke_llama_2x2x2": (8, (2, 2, 2)),
    "pretrain_gpt2_124m": (8, (1, 1, 8)),
    "pretrain_llama_8b": (64, (8, 4, 2)),
    "pretrain_pei_h2304": (8, (2, 1, 4)),
    "pretrain_pei_h4096": (64, (8, 1, 8)),
    "pretrain_pei_h6144": (64, (8, 1, 8)),
}

SMOKE_WRITTEN_OUT = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.002, "betas": [0.9, 0.95], "eps": 1e-08, "weight_decay": 0.1}},
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {"warmup_num_steps": 40, "total_num_steps": 400, "warmup_type": "linear", "cos_min_ratio": 0.1},
    },
    "megasdc": {
        "model": {"preset": "gpt2-1m"},
        "data": {
            "path": "prepared/stdlib",
            "sequence_length": 128,
            "split": [98, 1, 1],
            "tokenizer": {"kind": "sentencepiece", "vocab_size": 4096, "train_characters": 5_000_000},
        },
        "parallel": {"tensor": 1, "pipeline": 1},
        "training": {"steps": 400, "seed": 1234, "eval_interval": 100, "eval_samples": 32},
        "checkpoint": {"interval": 100, "keep_last": 2},
        "logging": {"run_dir": "runs/smoke", "interval": 20},
    },
}
"""`configs/smoke.json` as it was, with every field that it stands for."""


@pytest.mark.parametrize("name", RANKS)
def test_example_fits_its_ranks(name):
    """Loads without a warning, divides the ranks as its name or model says, and survives the round trip."""
    config = load_config(FOLDER / f"{name}.json")
    world_size, expected = RANKS[name]
    layout = check_layout(config, world_size)
    assert (layout.tensor, layout.pipeline, layout.data) == expected
    assert find_warnings(config) == []
    assert parse_config(config.resolved()) == config


def test_smoke_says_only_what_does_not_follow():
    """The file before, with every field written out, and the short one are one configuration on 2 ranks, so that runs
    go on; on other numbers of ranks a step keeps its samples.
    """
    short = load_config(FOLDER / "smoke.json")
    long = parse_config(SMOKE_WRITTEN_OUT)
    assert len((FOLDER / "smoke.json").read_text().splitlines()) <= 25
    assert check_layout(short, 2) == check_layout(long, 2) and find_changes(long.resolved(), short, 2, 2) == []
    sizes = {"gradient_accumulation_steps": check_layout(short, 2).accumulation_steps}
    assert {**short.resolved(), **sizes} == long.resolved()
    assert [check_layout(short, ranks).accumulation_steps for ranks in (1, 2, 3, 4)] == [4, 2, 2, 1]
    assert {check_layout(short, ranks).train_batch_size for ranks in (1, 2, 3, 4)} == {16}


@pytest.mark.parametrize("name", [name for name in RANKS if "pei" in name])
def test_published_hyper_parameters(name):
    """Pei et al. 2025: AdamW .9/.95, clip 1, LR 5e-4, warm-up 1750 of 5000; 512 x 2048 tokens of C4, else 256."""
    config = load_config(FOLDER / f"{name}.json")
    params = config.deepspeed["optimizer"]["params"]
    assert (params["lr"], params["betas"]) == (5e-4, [0.9, 0.95])
    assert config.deepspeed["gradient_clipping"] == 1.0
    assert config.deepspeed["scheduler"]["params"]["warmup_num_steps"] == 1750
    assert config.megasdc.training.steps == 5000
    assert config.deepspeed["train_batch_size"] == (512 if "h2304" in name else 256)
    assert config.megasdc.data.sequence_length == 2048
    assert config.megasdc.data.sources[0].path == "allenai/c4"
    assert config.megasdc.data.sources[0].streaming


def test_every_training_file_is_listed_here():
    """A new file with a `megasdc` key gets a number of ranks in this test."""
    found = {path.stem for path in FOLDER.glob("*.json") if "megasdc" in json.loads(path.read_text())}
    assert found == set(RANKS)
