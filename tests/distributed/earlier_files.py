"""Maker of ``earlier.tar.xz``: small files of every kind that a run leaves, as the commit that made them writes them.

Made anew only when the version of a format changes on purpose:

    PYTHONPATH=$PWD:$PWD/tests/distributed python tests/distributed/earlier_files.py tests/distributed/earlier.tar.xz
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import run_command, run_distributed
from typer.testing import CliRunner
from whole_runs import metrics_of, train_run, verdicts_of, write_config

from megasdc.cli import app
from megasdc.config.schema import remove_removed

REPOSITORY = Path(__file__).parents[2]
PLACE = "/earlier"
"""The folder of all files, in paths of stored configurations; ``unpack`` puts the real one there."""
CONFIGURATIONS = ("halted.json", "node_local.json", "guard.json")
SAID = "said.json"
STEPS, SAVED, HALTED = 10, 6, 8
"""Steps of a run, the one whose checkpoint is kept, and the one whose fault ends the run."""
NODE_STEPS, NODE_SAVED = 6, 4
MODEL = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "max_positions": 32, "fuse": False}
MODEL_VOCAB = 400
CHECKS: dict[str, Any] = {
    "determinism": {"enabled": True},
    "audit": {"enabled": True, "interval": 4, "micro_batch": "extra", "verify_checkpoints": True},
    "sdc": {"always_on": {"enabled": True, "coverage": "all", "rows": True, "slice_elements": 1_000_000}},
    "trace": {"enabled": True, "interval": 3, "details": True},
    "drop_compute": {"enabled": True, "threshold": "inf"},
}
BOUNDS: list[dict[str, Any]] = [
    {"hook": "spike_aware", "theta": 50.0, "non_finite": "bound", "warn_share": 0.5, "grace_steps": 2},
    {"hook": "absolute", "theta": 0.05, "parameters": ["*.mlp.*"]},
    {"hook": "momentum_reset", "interval": 5, "warmup_steps": 3},
]
FAULT = {"submodule": "*.linear_fc1", "kind": "scale", "factor": 3.0, "rank": 1}
FAULTS = [
    {**FAULT, "steps": [4, 4], "phase": "optimizer_state", "slot": "weight*", "once": True},
    {**FAULT, "steps": [HALTED, None], "same_elements": True},
]
"""One that is put right, and one that ends the run."""
SCHEDULER = {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 4, "total_num_steps": STEPS}}
COMMON: dict[str, Any] = {
    "deepspeed__gradient_clipping": 1.0,
    "deepspeed__scheduler": SCHEDULER,
    "model": MODEL,
    "training": {"steps": STEPS, "eval_interval": 5, "eval_samples": 4},
    "optimizer_hooks": BOUNDS,
}
GUARD_STEPS = 2
LLAMA = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
"""Sizes of the guarded model, beside those of ``tools.trainings.engines``."""
CHECKPOINTS = {
    "halted": f"halted/checkpoints/step_{SAVED:08d}",
    "node_local": f"node_local/checkpoints/step_{NODE_SAVED:08d}",
    "universal": "universal",
    "exported": "exported",
}


# --- what is made -----------------------------------------------------------------------------------------------------


def prepare(folder: Path) -> Path:
    """Prepared data: paragraphs of README and the smallest tokenizer."""
    from megasdc.config.data import DataSection
    from megasdc.data.prepare import prepare as prepare_data

    shutil.copy(REPOSITORY / "README.md", folder / "text.txt")
    section = DataSection.model_validate(
        {
            "path": str(folder / "data"),
            "split": [8, 1, 1],
            "sources": [{"kind": "files", "path": str(folder / "text.txt"), "text_unit": "paragraph"}],
            "tokenizer": {"vocab_size": MODEL_VOCAB, "train_characters": 100_000},
        }
    )
    prepare_data(section, folder / "data", workers=1, progress=False)
    return folder / "data"


def train(config: Path, ranks: int, code: int, *overrides: str) -> Path:
    """Train, see the exit code, and return the run folder."""
    results = train_run(config, ranks, *overrides, timeout_s=600.0)
    assert [found for found, _ in results] == [code] * ranks, results
    return config.with_suffix("")


def run_guarded(settings: dict[str, Any] | str, steps: int, wrong: bool) -> tuple[int, list[float]]:
    """Body of a rank: train a tiny Llama under a guard, rank 1 wrong from the start; exit code and losses."""
    import megasdc
    from tools.trainings.engines import PERSISTENT, Planted, deepspeed_config, llama_engine
    from tools.trainings.engines import train as train_steps

    rank = dist.get_rank()
    planted = Planted(rank, "model.layers.1.mlp.up_proj", "forward", PERSISTENT) if wrong and rank == 1 else None
    guard = megasdc.attach(engine := llama_engine(deepspeed_config(0, "fp32"), planted, **LLAMA), settings)
    try:
        return 0, train_steps(engine, steps, rank)
    except SystemExit as error:
        return int(str(error.code)), []
    finally:
        guard.close()


def command(*arguments: object) -> Any:
    """What a command of megasdc says as JSON; its exit code must be 0."""
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert result.exit_code == 0, (arguments, result.output, result.exception)
    return json.loads(result.stdout)


def evaluated(weights: Path, config: Path) -> float:
    """Loss of a model, by the command, on the validation split."""
    done = run_command("eval", str(weights), "--config", str(config), "--samples", "4", "--json")
    assert done.returncode == 0, done.stderr
    loss: float = json.loads(done.stdout)["loss"]
    return loss


def make_runs(folder: Path, data: Path) -> dict[str, list[dict[str, Any]]]:
    """The runs of megasdc itself; metrics of those that nothing disturbed."""
    common = {**COMMON, **CHECKS, "checkpoint": {"interval": 3, "keep_last": 1}}
    straight = train(write_config(folder / "straight.json", data, folder / "straight", **common), 2, 0)
    halted = write_config(folder / "halted.json", data, folder / "halted", **common, faults=FAULTS)
    train(halted, 2, 73)
    layout = {"parallel": {"tensor": 2, "pipeline": 2, "timeout_s": 60.0}, "training": {"steps": NODE_STEPS}}
    layout["checkpoint"] = {"storage": "node_local", "writing": "async", "interval": 2, "keep_last": 1}
    found = {"straight": metrics_of(straight)}
    before = [row for row in found["straight"] if row["step"] < HALTED]
    assert metrics_of(folder / "halted") == before, "the first fault was put right"
    assert [one[:4] for one in verdicts_of(folder / "halted")] == [
        (4, "state", 1, "not_reproduced"),
        (HALTED, "audit", 1, "persistent"),
    ]
    for name, stop in (("node_straight", NODE_STEPS), ("node_local", NODE_SAVED)):
        config = write_config(folder / f"{name}.json", data, folder / name, **{**COMMON, **layout})
        found[name] = metrics_of(train(config, 4, 0, f"megasdc.training.stop_step={stop}"))
    for name in ("straight", "node_straight"):
        shutil.rmtree(folder / name)
        (folder / f"{name}.json").unlink()
    for kept in ("halted", "node_local"):
        for checkpoint in (folder / kept / "checkpoints").glob("step_*"):
            if checkpoint != folder / CHECKPOINTS[kept]:
                shutil.rmtree(checkpoint)
    return found


def make_forms(folder: Path, data: Path) -> None:
    """The other forms of the halted run's checkpoint, and a golden file."""
    checkpoint = folder / CHECKPOINTS["halted"]
    golden = {"model": MODEL, "golden": {"vocab_size": 64, "steps": 1}, "optimizer_hooks": []}
    config = write_config(folder / "golden.json", data, folder / "golden_run", **golden)
    for arguments in (
        ("convert-checkpoint", checkpoint, "--to", "universal", "--out", folder / "universal"),
        ("archive", "push", checkpoint, folder / "archive"),
        ("manifest", checkpoint, "--out", folder / "halted.manifest"),
        ("golden", "record", "--config", config, "--out", folder / "megasdc.golden", "--repeats", 1),
    ):
        command(*arguments)
    llama = {**MODEL, "position_embedding": "rope", "normalization": "RMSNorm", "activation": "silu"}
    llama |= {"gated_mlp": True, "bias": False, "tie_embeddings": False}
    training = {"steps": 1, "eval_interval": 0}
    run = train(write_config(folder / "llama.json", data, folder / "llama", model=llama, training=training), 1, 0)
    for arguments in (
        ("export-hf", run / "checkpoints", folder / "exported"),
        ("import-hf", folder / "exported", folder / "imported"),
    ):
        command(*arguments)
    shutil.rmtree(run)
    config.unlink()
    (folder / "llama.json").unlink()


def make_guarded(folder: Path) -> list[list[float]]:
    """A guarded training: a golden file, losses of two steps of healthy ranks, and a run folder with an incident."""
    file = folder / "guard.json"
    settings = {
        "logging": {"run_dir": str(folder / "guarded")},
        "audit": {"interval": 2},
        "golden": {"path": str(folder / "guard.golden"), "interval": 2},
        "trace": {"enabled": True},
    }
    recording = {**settings, "logging": {"run_dir": str(folder / "recorded")}}
    recording |= {"audit": {"enabled": False}, "golden": {**settings["golden"], "record": True}}
    run_distributed(run_guarded, 1, recording, 1, False)
    file.write_text(json.dumps(settings))
    healthy = {**settings, "logging": {"run_dir": str(folder / "healthy")}}
    found = run_distributed(run_guarded, 2, healthy, GUARD_STEPS, False)
    assert [code for code, _ in found] == [0, 0], found
    assert [code for code, _ in run_distributed(run_guarded, 2, str(file), GUARD_STEPS, True)] == [73, 73]
    for name in ("recorded", "healthy"):
        shutil.rmtree(folder / name)
    return [losses for _, losses in found]


# --- what is said of it -----------------------------------------------------------------------------------------------

UNSTEADY = ("age_s", "time", "versions")
"""Keys whose values are of a date or of versions."""
WORDS, SENTENCE = 4, "..."
"""Most words of a text that is compared, and what stands for others: they may be worded otherwise."""


def what_is_said(folder: Path) -> dict[str, Any]:
    """What commands say of the files in a folder, without places, dates and versions."""
    found = {
        "summary of halted": command("summary", folder / "halted"),
        "summary of node_local": command("summary", folder / "node_local"),
        "summary of guarded": command("summary", folder / "guarded"),
        "report of halted": command("report", folder / "halted", "--out", folder / "page.html"),
        "archive list": command("archive", "list", folder / "archive"),
        "archive verify": command("archive", "verify", folder / "archive"),
    }
    for name, place in CHECKPOINTS.items():
        found[f"inspect {name}"] = command("inspect-checkpoint", folder / place)
    for name in ("halted", "node_local", "universal"):
        found[f"verify {name}"] = command("verify-checkpoint", folder / CHECKPOINTS[name])
    return {name: steady(value, str(folder)) for name, value in found.items()}


def steady(value: Any, folder: str) -> Any:
    """The same without ``UNSTEADY`` and sentences, and with a fixed place for the folder."""
    if isinstance(value, dict):
        return {key: steady(one, folder) for key, one in value.items() if key not in UNSTEADY}
    if isinstance(value, list):
        return [steady(one, folder) for one in value]
    if isinstance(value, str):
        return value.replace(folder, PLACE) if len(value.split()) <= WORDS else SENTENCE
    return value


def unsaid(then: Any, now: Any, where: str = "") -> list[str]:
    """What was said then and is not said now; what is said now and was not then is no matter."""
    if isinstance(then, dict) and isinstance(now, dict):
        return [line for key, one in then.items() for line in unsaid(one, now.get(key), f"{where}/{key}")]
    if isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        return [line for i, one in enumerate(then) for line in unsaid(one, now[i], f"{where}/{i}")]
    return [] if then == now else [f"{where}: {then!r}, now {now!r}"]


def cpu_kind() -> list[str]:
    """What bits of a training on a CPU depend on besides the program: the processor and PyTorch."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return [name, torch.backends.cpu.get_cpu_capability(), torch.__version__]


def versions() -> dict[str, str]:
    """What golden files are recorded with, besides."""
    return {name: metadata.version(name) for name in ("torch", "deepspeed", "megatron-core", "megasdc")}


# --- the file ---------------------------------------------------------------------------------------------------------


def unpack(file: Path, folder: Path) -> Path:
    """Unpack; the folder of all files.

    The configurations get the folder, and lose keys that are gone, as by a user who has moved it and was told of them;
    run folders and checkpoints stay as they are.
    """
    with tarfile.open(file) as packed:
        packed.extractall(folder, filter="data")
    for config in (folder / name for name in CONFIGURATIONS):
        raw = json.loads(config.read_text(encoding="utf-8").replace(f'"{PLACE}/', f'"{folder}/'))
        remove_removed(raw)
        config.write_text(json.dumps(raw, indent=2), encoding="utf-8")
    return folder


def pack(folder: Path, file: Path) -> None:
    """Pack a folder, with nothing in it of who packed it."""

    def nobody(one: tarfile.TarInfo) -> tarfile.TarInfo:
        one.uid = one.gid = one.mtime = 0
        one.uname = one.gname = ""
        return one

    for config in (folder / name for name in CONFIGURATIONS):
        config.write_text(config.read_text(encoding="utf-8").replace(f'"{folder}/', f'"{PLACE}/'), encoding="utf-8")
    with tarfile.open(file, "w:xz", preset=9) as packed:
        for path in sorted(folder.iterdir()):
            packed.add(path, path.name, filter=nobody)


def make(file: Path) -> None:
    """Make the file."""
    with tempfile.TemporaryDirectory(prefix="earlier_") as place:
        folder = Path(place)
        data = prepare(folder)
        metrics = make_runs(folder, data)
        make_forms(folder, data)
        losses = make_guarded(folder)
        shown = ["git", "rev-parse", "HEAD"]
        commit = subprocess.run(shown, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.strip()
        (folder / "metrics.json").write_text(json.dumps({**metrics, "guarded": losses}))
        (folder / "made.json").write_text(json.dumps({"commit": commit, "cpu": cpu_kind(), "versions": versions()}))
        pack(folder, file)
    with_what_is_said(file)


def with_what_is_said(file: Path) -> None:
    """Add what commands say of the files where they are unpacked; the folder that made them is gone by then."""
    with tempfile.TemporaryDirectory() as place, tempfile.TemporaryDirectory() as other:
        folder, untouched = unpack(file, Path(place)), unpack(file, Path(other))
        said = what_is_said(folder) | {"loss of imported": evaluated(folder / "imported", folder / "halted.json")}
        (untouched / SAID).write_text(json.dumps(said, indent=1))
        pack(untouched, file)


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    make(Path(sys.argv[1]))
