"""Does the key of a golden trace hold what changes bits, and does the workload leave out what must not be in it?"""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import pytest
import torch

import megasdc
from megasdc.config.load import RunConfig, load_config, parse_config
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.golden import key_differences, machine_key, processor_name
from megasdc.train.detection.golden import workload_config
from megasdc.train.detection.golden_key import golden_key, workload_digest

EXAMPLES = Path(__file__).parents[3] / "configs"
ARM = """processor\t: 0
BogoMIPS\t: 243.75
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp ssbs
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0c
CPU revision\t: 1

processor\t: 1
CPU implementer\t: 0x41
CPU part\t: 0xd0d
"""
X86 = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 85
model name\t: Intel(R) Xeon(R) CPU @ 2.00GHz
stepping\t: 3
"""


def _config(**sections: Any) -> RunConfig:
    model = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "max_positions": 64}
    data = {"path": "none", "sequence_length": 16}
    needed = {"protect": "off", "model": model, "data": data, "training": {"steps": 5}, "logging": {"run_dir": "none"}}
    return parse_config({"train_micro_batch_size_per_gpu": 1, "megasdc": {**needed, **sections}})


@pytest.mark.parametrize(
    ("text", "name"), [(ARM, "0x41 8 0x3 0xd0c 1"), (X86, "Intel(R) Xeon(R) CPU @ 2.00GHz 6 85 3")], ids=["arm", "x86"]
)
def test_processors_are_told_apart(text: str, name: str, tmp_path: Path) -> None:
    """By the fields that each architecture has in /proc/cpuinfo; two Arm processors do not get one name."""
    (tmp_path / "cpuinfo").write_text(text)
    assert processor_name(tmp_path / "cpuinfo") == name


def test_a_processor_that_tells_no_fields_is_known_by_its_architecture(tmp_path: Path) -> None:
    """Where there is no such file, and where it has none of the fields."""
    (tmp_path / "cpuinfo").write_text("flags: fast\n")
    assert processor_name(tmp_path / "cpuinfo") == platform.machine()
    assert processor_name(tmp_path / "none") in (platform.processor(), platform.machine()) and platform.machine()


@pytest.mark.skipif(torch.cuda.is_available(), reason="of processors")
@pytest.mark.parametrize("name", ["MKL_CBWR", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "OMP_DYNAMIC"])
def test_the_environment_is_part_of_the_key(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that chooses kernels or the number of threads is in the key where it is set."""
    monkeypatch.delenv(name, raising=False)
    before = machine_key()
    monkeypatch.setenv(name, "AVX2")
    assert {key: value for key, value in machine_key().items() if before.get(key) != value} == {name: "avx2"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="of processors")
def test_threads_are_those_in_force() -> None:
    """The key says with how many threads this process computes, not how many the configuration wants."""
    config = _config(parallel={"threads": torch.get_num_threads() + 3})
    key = golden_key(config, ParallelDims(1, 1, 1), "xxh3_64.v1")
    assert key["threads"] == torch.get_num_threads()
    assert key["megasdc"] == megasdc.__version__


def test_a_workload_has_no_faults(tmp_path: Path) -> None:
    """Faults of the run, with the profile files that they name, are not recorded as a part of its workload."""
    profile = {"description": "a", "source": "b", "published": {}, "assumed": [], "faults": [{"submodule": "3.*"}]}
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(profile))
    config = _config(faults=[{"profile": str(file)}], process_faults=[{"kind": "hang", "rank": 5}])
    file.unlink()
    assert workload_config(config) == workload_config(_config())


def test_fused_modules_are_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their bits are others, and depend on the compiler; the key without them is what it was before there were any."""
    monkeypatch.setattr("megasdc.train.detection.golden_key.code_generator", lambda: "a compiler")
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "max_positions": 64}
    keys = [golden_key(_config(model={**sizes, "fuse": on}), ParallelDims(1, 1, 1), "xor") for on in (False, True)]
    assert key_differences(*keys) == {"fused": (None, "functions 2, a compiler")}


def test_a_workload_has_no_part_of_the_run_that_it_does_not_compute() -> None:
    """Bounds, resets, hooks, saves, audits and their policies neither change it nor contradict its two steps."""
    run: dict[str, Any] = {
        "optimizer_hooks": [{"hook": "spike_aware", "theta": 50.0, "grace_steps": 20}, {"hook": "momentum_reset"}],
        "training": {"steps": 1000, "stop_step": 500, "eval_interval": 10},
        "checkpoint": {"interval": 100, "other_layout": "convert", "memory": {"interval": 1, "partners": True}},
        "determinism": {"enabled": True},
        "audit": {"enabled": True, "verify_checkpoints": True},
        "sdc": {"policy": {"persistent": "isolate"}},
        "health": {"alert_command": ["no-such-program"]},
        "supervise": {"num_hosts": 3},
    }
    config, plain = workload_config(_config(**run)), workload_config(_config(training={"steps": 1000}))
    assert config == plain and workload_digest(config) == workload_digest(plain)


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.json")), ids=lambda file: file.stem)
def test_a_workload_is_made_of_every_example(file: Path) -> None:
    """None of them is refused for what its golden trace leaves out."""
    assert workload_config(load_config(file)).megasdc.optimizer_hooks == []
