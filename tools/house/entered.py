"""Number of files of the package that one rank enters: at its start, in steps, in a save, in a resume, in a verdict.

A file is entered where one of its functions is called, or at the start where the body of its module is executed. Rank 0
of two replicas is counted, of a tiny model on CPU that ``megasdc launch`` starts with ``tools/house/rank.py`` as its
training script: its main thread, and threads in the phase in which they begin. Four trainings of six steps are made:
without checks, the same run resumed, with checks (always on, and an audit in every second step), and so with faults.

- start to first step: files executed from the begin of the process to the first call of the loop's step function, and
  those of them of which a function was called, not the bodies of module and classes alone;
- a plain step: step 3 of the training without checks, in which nothing is due;
- a checked step: step 4 of the training with checks, an audited one, all its files;
- a synchronous save, on top: files of step 4 of the training without checks, after which it saves, but those of step 3;
- resume from disk: files of functions that the resumed start calls, and the first start did not;
- a verdict, on top: files of step 4 of the training with faults, whose audit finds a persistent one, which the referee
  names and the policy halts; but those of a checked step, and those of step 3 there, whose fault no check sees.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tools.bench.machine import ROOT
from tools.bench.result import Report, Result, table
from tools.house.rank import OUT_VARIABLE

RANKS = 2
STEPS = 6
SAVED = 4
PLAIN = 3
HALTED = 73
"""Exit code of a run that is halted because of silent data corruption."""
LINES = 30
"""Lines of a failed command's output that are shown."""
TEXTS = ("argparse", "ast", "inspect", "tarfile", "typing")
"""Modules of the standard library on whose text the model is trained."""
Phases = dict[str, dict[str, list[str]]]
"""Functions of a rank by phase and file, see ``tools/house/rank.py``."""


@dataclass(frozen=True)
class Entered(Result):
    """Files entered by a rank.

    Args:
        files: names by phase.
        listed: whether they are shown too.
    """

    also = ()

    files: dict[str, list[str]] = field(repr=False)
    listed: bool

    def report(self) -> Report:
        """A row a phase, and the files where they are asked for."""
        yield table("files entered by one rank", ("phase", "files"), [(n, str(len(f))) for n, f in self.files.items()])
        for name, files in self.files.items() if self.listed else ():
            yield f"{name}:"
            yield from (f"  {file}" for file in files)

    def as_dict(self) -> dict[str, Any]:
        """The result for JSON; without lists of files where they are not asked for."""
        return super().as_dict() | ({} if self.listed else {"files": {n: len(f) for n, f in self.files.items()}})


def count(config: Path | None) -> dict[str, list[str]]:
    """Train, and return the names of files entered, by phase.

    Args:
        config: file whose other settings the trainings have; None: the defaults.

    Raises:
        ValueError: a training failed or has other steps than expected, with the end of its output.
    """
    with TemporaryDirectory(prefix="house_") as name:
        folder = Path(name)
        plain = tiny(json.loads(config.read_text(encoding="utf-8")) if config else {}, folder)
        _prepare(folder, plain)
        first = _train(folder, "plain", plain)
        again = deepcopy(plain)
        again["megasdc"]["training"]["stop_step"] = STEPS + 1
        resumed = _train(folder, "again", again)
        checks = with_checks(plain)
        checked = _train(folder, "checked", checks)
        harmed = _train(folder, "faults", with_faults(checks), HALTED)
    return files_of(first, resumed, checked, harmed)


def files_of(first: Phases, resumed: Phases, checked: Phases, harmed: Phases) -> dict[str, list[str]]:
    """Names of files entered, by what the module's documentation defines; from phases of the four trainings.

    Raises:
        ValueError: a phase is missing.
    """
    for name, phases in {"plain": first, "checked": checked, "faults": harmed}.items():
        if missing := {"start", f"step {PLAIN}", f"step {SAVED}"} - phases.keys():
            raise ValueError(
                f"training {name!r} has no {', '.join(sorted(missing))}, but {', '.join(phases)}: is the function that "
                "takes a step still called as STEP in tools/house/rank.py says?"
            )
    start, again = first["start"], resumed["start"]
    plain, check, found = set(first[f"step {PLAIN}"]), set(checked[f"step {SAVED}"]), set(harmed[f"step {SAVED}"])
    entered = {
        "start to first step": set(start),
        "of them with a function called": {file for file, functions in start.items() if functions},
        "a plain step": plain,
        "a checked step": check,
        "a synchronous save, on top": set(first[f"step {SAVED}"]) - plain,
        "resume from disk": {file for file, functions in again.items() if set(functions) - set(start.get(file, []))},
        "a verdict, on top": found - check - set(harmed[f"step {PLAIN}"]),
    }
    return {name: sorted(files) for name, files in entered.items()}


def tiny(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A configuration with its data, sizes of model and batch, layout, steps and saves replaced by small ones.

    Checks, faults, archive, other replicas and the watch over health are off; neither a line nor an evaluation is due.
    """
    deepspeed = {
        "train_batch_size": 2 * RANKS,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 1_000_000},
    }
    sizes = {
        **{"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "max_positions": 64},
        **dict.fromkeys(["num_query_groups", "kv_channels", "ffn_hidden_size"]),  # those that follow from these
    }
    sections: dict[str, Any] = {
        "data": {
            "path": str(folder / "data"),
            "sequence_length": 32,
            "split": [8, 1, 1],
            "sources": [{"kind": "files", "path": str(folder / "texts")}],
            "tokenizer": {"vocab_size": 500, "train_characters": 200_000},
        },
        "parallel": {"timeout_s": 600.0},
        "checkpoint": {"interval": SAVED, "keep_last": 0, "writing": "sync"},
        "health": {"enabled": False},
        "logging": {"run_dir": str(folder / "run")},
    }
    made = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, **deepcopy(config), **deepspeed}
    own = made.get("megasdc", {})
    own["model"] = {**own.get("model", {}), **sizes}
    own["training"] = {"steps": 1000, **own.get("training", {}), "stop_step": STEPS, "eval_interval": 0}
    for name in ("faults", "process_faults", "sdc", "audit", "local_sgd"):
        own.pop(name, None)
    return {**made, "megasdc": {**own, **sections}}


def with_checks(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration with checks of every step and an audit in every second one, that saves at its end alone."""
    made = deepcopy(config)
    own = made["megasdc"]
    own["determinism"] = {"enabled": True}
    own["sdc"] = {"always_on": {"enabled": True, "coverage": "one"}}  # looks in each step, however long that takes
    own["audit"] = {"enabled": True, "interval": 2}
    own["checkpoint"]["interval"] = 0
    own["logging"]["run_dir"] += "_checked"
    return made


def with_faults(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration in which rank 1 is wrong in a step without an audit, and each time in that of the next one."""
    made = deepcopy(config)
    fault = {"submodule": "*.linear_fc1", "phase": "weight_grad", "rank": 1, "same_elements": True, "bits": [20]}
    made["megasdc"]["faults"] = [{**fault, "steps": [PLAIN, SAVED]}]
    made["megasdc"]["logging"]["run_dir"] += "_faults"
    return made


def _prepare(folder: Path, config: dict[str, Any]) -> None:
    texts = folder / "texts"
    texts.mkdir()
    for name in TEXTS:
        text = Path(sysconfig.get_paths()["stdlib"], f"{name}.py").read_text(encoding="utf-8")
        (texts / f"{name}.txt").write_text(text, encoding="utf-8")
    _call(folder, "data", config, ["prepare-data"], {})


def _train(folder: Path, name: str, config: dict[str, Any], expected: int = 0) -> Phases:
    """Phases of rank 0 of a training."""
    out = folder / f"{name}_out"
    out.mkdir()
    script = str(Path(__file__).with_name("rank.py"))
    options = ["--num-ranks", str(RANKS), "--script", script]
    _call(folder, name, config, ["launch", *options], {OUT_VARIABLE: str(out)}, expected)
    phases: Phases = json.loads((out / "rank_0.json").read_text(encoding="utf-8"))
    return phases


def _call(
    folder: Path,
    name: str,
    config: dict[str, Any],
    words: Sequence[str],
    variables: Mapping[str, str],
    code: int = 0,
) -> None:
    """Call a command of megasdc with a configuration, on CPU.

    Args:
        name: of the files of this call in the folder.
        words: the command and its options.
        variables: further ones of its environment.
        code: that it must end with.

    Raises:
        ValueError: it ended with another one; with the end of its output.
    """
    path, log = folder / f"{name}.json", folder / f"{name}.log"
    path.write_text(json.dumps(config), encoding="utf-8")
    command = [sys.executable, "-m", "megasdc", *words, "--config", str(path)]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with open(log, "w", encoding="utf-8") as output:
        done = subprocess.run(
            command, cwd=ROOT, env={**environment, **variables}, stdout=output, stderr=output, check=False
        )
    if done.returncode != code:
        end = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-LINES:])
        raise ValueError(
            f"megasdc {words[0]} of training {name!r} ended with {done.returncode} instead of {code}:\n{end}"
        )
