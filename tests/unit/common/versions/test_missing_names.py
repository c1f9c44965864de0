"""What a start says where a private name that megasdc builds on is gone."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import megasdc
from megasdc.common import versions
from megasdc.common.errors import LaunchError
from megasdc.common.versions import (
    LAUNCHER,
    NODE,
    OWNERS,
    TRAINING,
    NameOwner,
    check_private_names,
    missing_names,
)

PACKAGE = Path(megasdc.__file__).parent
INNER = ("deepspeed.runtime", "deepspeed.launcher")
NOT_LIBRARIES = {"_exit", "_getframe", "_current_frames", "_checkpoint_offset"}
"""Of Python itself; and what torch notes on a storage, which a test of test_private_names.py looks at."""


@pytest.mark.parametrize("owner", OWNERS, ids=lambda owner: owner.where.replace("deepspeed.runtime.", ""))
def test_each_name_is_looked_for(owner, monkeypatch):
    """Without any one of the names of an owner the check says so."""
    found = versions.resolve(owner.where)
    for name in owner.names:
        hidden = Hidden(found, name)
        monkeypatch.setattr(versions, "resolve", lambda where, hidden=hidden: hidden)
        (problem,) = missing_names([NameOwner(owner.where, owner.needed_by, (name,))])
        assert name in problem and owner.needed_by in problem
    monkeypatch.undo()
    assert len(missing_names([NameOwner(owner.where, "x", ("_gone",), ("_left",))])) == 2


class Hidden:
    """Something without one of its attributes."""

    def __init__(self, found, name):
        self._found, self._name = found, name

    def __getattr__(self, name):
        if name == self._name:
            raise AttributeError(name)
        return getattr(self._found, name)


def test_a_missing_name_refuses_the_start(monkeypatch):
    """The error has the name, the version that lacks it, what needs it and the versions that have it; code 78."""
    from deepspeed.runtime.pipe.engine import PipelineEngine

    monkeypatch.delattr(PipelineEngine, "_exec_schedule")
    with pytest.raises(LaunchError) as caught:
        check_private_names(TRAINING)
    text = str(caught.value)
    assert text.startswith("DeepSpeed 0.19.")
    assert "has no deepspeed.runtime.pipe.engine.PipelineEngine: _exec_schedule" in text
    assert "which megasdc's engine, which subclasses it, needs" in text and "0.19" in text.partition(";")[2]
    assert caught.value.exit_code == 78
    check_private_names(LAUNCHER)
    check_private_names(NODE)


CHILD = """
import deepspeed.runtime.{module} as module
del module.{name}
from megasdc.pretrain import pretrain
print("exit code", pretrain("{config}", ["train_batch_size=8"])[0])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "name", "said"),
    [
        ("utils", "get_global_norm_of_tensors", "which the norm of bf16 gradients needs"),
        ("pipe.engine", "PipelineEngine", "which megasdc's engine, which subclasses it, needs"),
    ],
)
def test_a_rank_ends_with_the_message(module, name, said, tmp_path):
    """A rank in whose DeepSpeed a name is gone, also one that is imported, ends with 78 and the message."""
    root = PACKAGE.parent
    config = tmp_path / "c.json"
    config.write_text((root / "configs" / "smoke.json").read_text().replace("runs/smoke", str(tmp_path / "run")))
    code = CHILD.format(module=module, name=name, config=config)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=root)
    assert "exit code 78" in done.stdout, done.stderr
    assert said in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_list_is_complete():
    """Every name imported from DeepSpeed's private modules, and every private attribute of others, is in the list."""
    listed = {name for owner in OWNERS for name in (*owner.names, *owner.mentioned)}
    listed |= {owner.where.rpartition(":")[2].split(".")[-1] for owner in OWNERS}
    own, used = set(NOT_LIBRARIES), {}
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                own.add(node.target.id)
            elif isinstance(node, ast.ImportFrom) and str(node.module).startswith(INNER):
                used |= {alias.name: f"{file.relative_to(PACKAGE)}:{node.lineno}" for alias in node.names}
            elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                if isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
                    own.add(node.attr)
                used.setdefault(node.attr, f"{file.relative_to(PACKAGE)}:{node.lineno}")
    assert {name: place for name, place in used.items() if name not in own | listed} == {}
