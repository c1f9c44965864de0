"""Every file in configs/ is complete, valid, and fits the number of ranks it is meant for."""

import json
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("name", RANKS)
def test_example_fits_its_ranks(name):
    """Loads without a warning, divides the ranks as its name or model says, and survives the round trip."""
    config = load_config(FOLDER / f"{name}.json")
    world_size, expected = RANKS[name]
    layout = check_layout(config, world_size)
    assert (layout.tensor, layout.pipeline, layout.data) == expected
    assert find_warnings(config) == []
    assert parse_config(config.resolved()) == config


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
