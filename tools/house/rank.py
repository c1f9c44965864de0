"""Training script of a rank that counts: ``launch/pretrain_gpt.py``, and in which phase it enters which functions.

A script for ``megasdc launch --script``, which imports nothing of the package itself. It writes ``rank_N.json`` to the
folder that the variable ``HOUSE_OUT`` names: for each phase the functions that were entered, by file. Phases are
``start``, ``step N`` for each call of the function that the loop takes a step with, ``after N`` until the next one.
"""

from __future__ import annotations

import inspect
import json
import os
import runpy
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "launch" / "pretrain_gpt.py"
PACKAGE = str(ROOT / "megasdc") + os.sep
STEP = "train_step"
"""Name of the function of the loop that takes one step, which is no method; its calls are the borders of phases."""
OUT_VARIABLE = "HOUSE_OUT"


class Phases:
    """Functions entered by a process, by phase; a phase begins and ends in the main thread.

    A thread belongs to the phase in which it began: what it enters counts there until that ends, and then as
    ``threads``, which have phases of their own.
    """

    def __init__(self) -> None:
        self.entered: dict[str, dict[int, CodeType]] = {}
        self.steps = 0
        self.begin("start")

    def begin(self, phase: str) -> None:
        """Begin the next phase."""
        self.phase = phase
        self.entered.setdefault(phase, {})

    def as_dict(self) -> dict[str, dict[str, list[str]]]:
        """Names of functions by phase and file; a file of which bodies of module and classes alone ran has none."""
        result: dict[str, dict[str, list[str]]] = {}
        for phase, codes in self.entered.items():
            files = result[phase] = {}
            for code in list(codes.values()):
                if code.co_filename.startswith(PACKAGE) and code.co_filename.endswith(".py"):
                    functions = files.setdefault(code.co_filename.removeprefix(PACKAGE), [])
                    if code.co_flags & inspect.CO_OPTIMIZED:
                        functions.append(f"{code.co_qualname}:{code.co_firstlineno}")
        return result


class Watch:
    """Profile function of one thread."""

    def __init__(self, phases: Phases, is_main: bool) -> None:
        self._phases = phases
        self._is_main = is_main
        self._began = phases.phase
        self._entered = phases.entered[phases.phase]

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Called by the interpreter at each call and return."""
        code = frame.f_code
        if event == "call":
            if id(code) not in self._entered or (not self._is_main and self._began != self._phases.phase):
                self._enter(code)
        elif event == "return" and self._is_main and code.co_qualname == STEP and code.co_filename.startswith(PACKAGE):
            self._move(f"after {self._phases.steps}")

    def _enter(self, code: CodeType) -> None:
        if self._is_main and code.co_qualname == STEP and code.co_filename.startswith(PACKAGE):
            self._phases.steps += 1
            self._move(f"step {self._phases.steps}")
        if not self._is_main and self._began != self._phases.phase:
            self._began = self._phases.phase
            self._entered = self._phases.entered.setdefault("threads", {})
        self._entered[id(code)] = code

    def _move(self, phase: str) -> None:
        self._phases.begin(phase)
        self._entered = self._phases.entered[phase]


def main() -> None:
    """Train as the entry script does, and write what was entered."""
    phases, process, leave = Phases(), os.getpid(), os._exit
    out = Path(os.environ[OUT_VARIABLE]) / f"rank_{os.environ['RANK']}.json"

    def leave_with_result(status: int) -> NoReturn:
        if os.getpid() == process:  # not a fork of it
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
            out.write_text(json.dumps(phases.as_dict()), encoding="utf-8")
        leave(status)

    def watch_thread(frame: FrameType, event: str, argument: Any) -> None:
        watch = Watch(phases, is_main=False)
        sys.setprofile(watch)
        watch(frame, event, argument)

    os._exit = leave_with_result
    sys.path[0] = str(SCRIPT.parent)
    threading.setprofile(watch_thread)
    sys.setprofile(Watch(phases, is_main=True))
    runpy.run_path(str(SCRIPT), run_name="__main__")


if __name__ == "__main__":
    main()
