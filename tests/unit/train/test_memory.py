"""How much a rank needs at least follows the ZeRO paper, and only what certainly cannot fit is refused."""

import pytest

from megasdc.common.errors import ConfigError
from megasdc.common.host import MemoryLimit, memory_limits
from megasdc.config.checks import check_layout
from megasdc.config.load import parse_config
from megasdc.config.model import ffn_width
from megasdc.model.sizes import model_sizes
from megasdc.train.memory import GIB, check_memory, host_memory_bytes, memory_of_stages, memory_warning

VOCAB = 1000


def _config(model=None, deepspeed=None, **sections):
    sections = {
        "data": {"path": "x"},
        "protect": "off",
        "training": {"steps": 10},
        "logging": {"run_dir": "r"},
        **sections,
    }
    sizes = {"num_layers": 8, "hidden_size": 1024, "num_attention_heads": 16, "max_positions": 2048, **(model or {})}
    return parse_config({**(deepspeed or {}), "megasdc": {**sections, "model": sizes}})


def _parameters(config):
    model = config.megasdc.model
    return model_sizes(model, ffn_width(model), -(-VOCAB // model.vocab_multiple) * model.vocab_multiple).total


@pytest.mark.parametrize(
    ("deepspeed", "weight", "gradient", "state"),
    [
        ({}, 4, 4, 12),
        ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}}, 2, 2, 12),
        ({"bf16": {"enabled": True}}, 2, 4, 12),
        ({"fp16": {"enabled": True}}, 2, 2, 12),
    ],
    ids=["fp32", "bf16", "bf16 in fp32", "fp16"],
)
@pytest.mark.parametrize("replicas", [1, 64])
def test_model_states_are_those_of_the_zero_paper(deepspeed, weight, gradient, state, replicas):
    """ZeRO-1 needs 2 + 2 + 12 / N bytes a parameter in 16 bits (Rajbhandari et al. 2020, figure 1: P_os)."""
    config = _config(deepspeed=deepspeed)
    (stage,) = memory_of_stages(config, VOCAB, replicas, 1)
    assert stage.parameters == _parameters(config)
    assert stage.weights + stage.gradients + stage.state == stage.parameters * (weight + gradient + state / replicas)


def test_the_papers_example():
    """7.5 billion parameters over 64 replicas: 31.4 GB (figure 1 of the paper)."""
    per_parameter = memory_of_stages(_config(deepspeed={"fp16": {"enabled": True}}), VOCAB, 64, 1)[0]
    bytes_each = (per_parameter.weights + per_parameter.gradients + per_parameter.state) / per_parameter.parameters
    assert 7.5 * bytes_each == pytest.approx(31.4, abs=0.05)


def test_tensor_ranks_and_stages_divide_it():
    """Two tensor ranks have half each; the stages together have the whole model once."""
    whole = memory_of_stages(_config(model={"tie_embeddings": False}), VOCAB, 1, 1)[0]
    split = _config(model={"tie_embeddings": False}, parallel={"tensor": 2, "pipeline": 4})
    stages = memory_of_stages(split, VOCAB, 1, 1)
    assert sum(stage.parameters for stage in stages) == whole.parameters
    assert 2 * sum(stage.weights for stage in stages) == whole.weights


def test_activations_grow_with_micro_batches_and_shrink_with_recomputation():
    """At least the input of every layer is kept, with recomputation that of every second one."""
    kept = memory_of_stages(_config(), VOCAB, 1, 4)[0].activations
    logits = 4 * 512 * 4 * 1024
    assert kept == 4 * 512 * 4 * 8 * 1024 + logits
    less = _config(deepspeed={"pipeline": {"activation_checkpoint_interval": 2}})
    assert memory_of_stages(less, VOCAB, 1, 4)[0].activations == 4 * 512 * 4 * 4 * 1024 + logits


def test_what_cannot_fit_is_refused_with_the_numbers():
    """A host with one byte less than needed refuses and names both sizes; one with as much does not."""
    config = _config()
    stages = memory_of_stages(config, VOCAB, 1, 1)
    needed = stages[0].on_device + stages[0].state
    check_memory(config, stages, 0, 1, needed, None)
    with pytest.raises(ConfigError, match=rf"needs at least {needed / GIB:,.2f} GiB .*has {needed / GIB:,.2f} GiB"):
        check_memory(config, stages, 0, 1, needed - 1, None)
    with pytest.raises(ConfigError, match="this host, where 2 ranks run,"):
        check_memory(config, stages, 0, 2, 2 * needed - 1, None)
    assert memory_warning(config, stages, needed) is None
    assert "Ranks on this host would refuse" in memory_warning(config, stages, needed - 1)


def test_a_device_holds_the_state_unless_it_is_offloaded():
    """A device without room for the optimizer's state is refused, and is not when the host keeps it."""
    config = _config()
    stages = memory_of_stages(config, VOCAB, 1, 1)
    device, state = stages[0].on_device, stages[0].state
    with pytest.raises(ConfigError, match="its device has"):
        check_memory(config, stages, 0, 1, float("inf"), device)
    check_memory(config, stages, 0, 1, 0, device + state)
    offloads = _config(deepspeed={"zero_optimization": {"offload_optimizer": {"device": "cpu"}}})
    check_memory(offloads, stages, 0, 1, state, device)
    with pytest.raises(ConfigError, match="this host has"):
        check_memory(offloads, stages, 0, 1, state - 1, device)


def test_the_host_has_what_its_cgroups_leave(tmp_path):
    """Memory and swap of the host, or less where a control group of either version or one above it limits it."""
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal:  8 kB\nMemFree: 1 kB\nSwapTotal: 2 kB\n")
    assert host_memory_bytes(proc, cgroups) == 10 * 1024
    (proc / "self" / "cgroup").write_text("4:memory:/a/b\n0::/c\n")
    (cgroups / "memory" / "a" / "b").mkdir(parents=True)
    (cgroups / "c").mkdir()
    (cgroups / "c" / "memory.max").write_text("max\n")
    assert host_memory_bytes(proc, cgroups) == 10 * 1024
    (cgroups / "memory" / "a" / "memory.limit_in_bytes").write_text("7000\n")
    assert host_memory_bytes(proc, cgroups) == 7000 + 2048
    (cgroups / "memory.max").write_text("5000\n")
    assert host_memory_bytes(proc, cgroups) == 5000 + 2048
    assert host_memory_bytes(tmp_path / "none", cgroups) == float("inf")


def test_what_a_cgroup_uses_but_for_its_cache_is_told(tmp_path):
    """Of both versions; files that the kernel would give up do not count."""
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("4:memory:/a\n0::/c\n")
    for folder in (cgroups / "memory" / "a", cgroups / "c"):
        folder.mkdir(parents=True)
    for name, content in (("limit_in_bytes", "7000"), ("usage_in_bytes", "5000")):
        (cgroups / "memory" / "a" / f"memory.{name}").write_text(content)
    (cgroups / "memory" / "a" / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 1500\n")
    for name, content in (("max", "9000"), ("current", "6000"), ("stat", "inactive_file 2000\n")):
        (cgroups / "c" / f"memory.{name}").write_text(content)
    assert memory_limits(proc, cgroups) == [MemoryLimit(7000, 3500), MemoryLimit(9000, 4000)]
    (cgroups / "c" / "memory.max").write_text("max\n")
    assert memory_limits(proc, cgroups) == [MemoryLimit(7000, 3500)]


def test_this_host_says_how_much_it_has():
    """On Linux the real answer is a size, not infinity."""
    assert 2**28 < host_memory_bytes() < 2**60


def test_a_rank_looks_at_its_own_host(monkeypatch):
    """Before it builds anything a rank passes a tiny model, and refuses one that no host has the memory for."""
    from megasdc.train.build_engine import check_memory_here

    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    tiny = _config(model={"hidden_size": 64, "num_attention_heads": 4}, parallel={"pipeline": 2})
    check_memory_here(tiny, check_layout(tiny, 2), VOCAB)
    vast = _config(model={"hidden_size": 2**24}, parallel={"pipeline": 2})
    with pytest.raises(ConfigError, match=r"megasdc\.model: a rank with .* this host, where 2 ranks run, has"):
        check_memory_here(vast, check_layout(vast, 2), VOCAB)
