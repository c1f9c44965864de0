"""DeepSpeed's launch.py (0.19.8) without the rest of DeepSpeed, for a process that only starts and ends ranks.

Its package imports all that trains, PyTorch first: 2 s of processor time before a rank starts. Of all that launch.py
uses constants, a logger, numactl's command line, and the variable that hides devices. Constants and command line are
DeepSpeed's own files; the logger and the accelerator, whose files import PyTorch, are stood in for.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from megasdc.versions.private_names import NODE, check_private_names

MODULE = "deepspeed.launcher.launch"
ACCELERATOR_VARIABLE = "DS_ACCELERATOR"
NVML_VARIABLE = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Set by DeepSpeed's ``__init__`` unless the user has set it, and so for the ranks: to look for GPUs opens none."""
ALIKE = ("cuda", "cpu")
"""Accelerators of DeepSpeed for which the same variable lists the devices; training knows no others."""


class Accelerator:
    """What launch.py asks of DeepSpeed's accelerator, for those in ``ALIKE``."""

    def visible_devices_envs(self) -> list[str]:
        """Variables that list the devices of a process."""
        return ["CUDA_VISIBLE_DEVICES"]

    def set_visible_devices_envs(self, environment: MutableMapping[str, str], ids: Sequence[int]) -> None:
        """Let a process see these devices."""
        for name in self.visible_devices_envs():
            environment[name] = ",".join(map(str, ids))


def import_launch() -> Any:
    """Import launch.py, alone where it can be.

    It cannot be where ``DS_ACCELERATOR`` names an accelerator whose devices another variable may list, nor where
    DeepSpeed was imported before; then this imports PyTorch.

    Returns:
        The module.

    Raises:
        LaunchError: it lacks a name that we rely on.
    """
    if "deepspeed" in sys.modules or os.environ.get(ACCELERATOR_VARIABLE, ALIKE[0]) not in ALIKE:
        launch = importlib.import_module(MODULE)
        check_private_names(NODE)
        return launch
    os.environ.setdefault(NVML_VARIABLE, "1")
    with _stand_ins():
        launch = importlib.import_module(MODULE)
        check_private_names(NODE)
    return launch


@contextmanager
def _stand_ins() -> Iterator[None]:
    """Packages of DeepSpeed that find their modules but have not run; afterwards nothing of them is left."""
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or spec.submodule_search_locations is None:
        raise ModuleNotFoundError("No module named 'deepspeed'", name="deepspeed")
    (folder,) = map(Path, spec.submodule_search_locations)
    try:
        _package("deepspeed", folder)
        _package("deepspeed.accelerator", folder / "accelerator", get_accelerator=Accelerator)
        utils = _package("deepspeed.utils", folder / "utils", logger=_logger(), set_log_level_from_string=_set_level)
        utils.get_numactl_cmd = importlib.import_module("deepspeed.utils.numa").get_numactl_cmd  # type: ignore[attr-defined]
        yield
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
            del sys.modules[name]


def _package(name: str, folder: Path, **attributes: Any) -> ModuleType:
    package = ModuleType(name)
    package.__path__ = [str(folder)]
    vars(package).update(attributes)
    sys.modules[name] = package
    return package


def _logger() -> logging.Logger:
    """DeepSpeed's logger, as its ``utils/logging.py`` makes it."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(
        logging.Formatter("[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d:%(funcName)s] %(message)s")
    )
    logger = logging.getLogger("DeepSpeed")
    logger.propagate = False
    logger.handlers[:] = [handler]
    return logger


def _set_level(name: str) -> None:
    logging.getLogger("DeepSpeed").setLevel(name.upper())
