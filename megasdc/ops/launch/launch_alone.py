"""DeepSpeed 0.19's launch.py without the rest of DeepSpeed, for a process that only starts and ends ranks.

The package imports everything for training, including PyTorch: 2 s of processor time before a rank starts. Of that,
launch.py uses only constants, a logger, numactl's command line, and the variable that lists visible devices. Constants
and command line come from DeepSpeed's own files; the logger, the accelerator and elastic training (which older versions
query and megasdc never starts) would import PyTorch and are replaced by stubs.
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

from megasdc.common.errors import LaunchError
from megasdc.common.versions import NODE, check_private_names

MODULE = "deepspeed.launcher.launch"
ACCELERATOR_VARIABLE = "DS_ACCELERATOR"
NVML_VARIABLE = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Set by the ``__init__`` of DeepSpeed 0.19.4 and later unless the user has set it, and here too, for the ranks: the
search for GPUs then opens none."""
ALIKE = ("cuda", "cpu")
"""Accelerators of DeepSpeed whose devices the same variable lists; training supports no others."""


class AcceleratorStub:
    """Stub of DeepSpeed's accelerator with what launch.py needs, for those in ``ALIKE``."""

    def visible_devices_envs(self) -> list[str]:
        """Variables that list the devices of a process."""
        return ["CUDA_VISIBLE_DEVICES"]

    def set_visible_devices_envs(self, environment: MutableMapping[str, str], ids: Sequence[int]) -> None:
        """Make only these devices visible to a process."""
        for name in self.visible_devices_envs():
            environment[name] = ",".join(map(str, ids))


def import_launch() -> Any:
    """Import launch.py, without the rest of DeepSpeed if possible.

    It is not possible if ``DS_ACCELERATOR`` names an accelerator whose devices another variable may list, if DeepSpeed
    was imported before, or if its release needs more than the stubs have, which is reported; then PyTorch is imported.

    Raises:
        LaunchError: it lacks a name that megasdc relies on.
    """
    if "deepspeed" not in sys.modules and os.environ.get(ACCELERATOR_VARIABLE, ALIKE[0]) in ALIKE:
        try:
            with _stand_ins():
                launch = _import_checked()
        except (ImportError, AttributeError, LaunchError) as error:
            print(f"megasdc launch: all of DeepSpeed is imported, 2 s more: {error}", file=sys.stderr, flush=True)
        else:
            os.environ.setdefault(NVML_VARIABLE, "1")
            return launch
    return _import_checked()


def _import_checked() -> Any:
    launch = importlib.import_module(MODULE)
    check_private_names(NODE)
    return launch


@contextmanager
def _stand_ins() -> Iterator[None]:
    """Install stub packages of DeepSpeed that find its modules without running its ``__init__``; removed afterwards."""
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or spec.submodule_search_locations is None:
        raise ModuleNotFoundError("No module named 'deepspeed'", name="deepspeed")
    (folder,) = map(Path, spec.submodule_search_locations)
    try:
        _package("deepspeed", folder)
        _package("deepspeed.accelerator", folder / "accelerator", get_accelerator=AcceleratorStub)
        _package("deepspeed.elasticity", folder / "elasticity", is_torch_elastic_compatible=lambda: False)
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
    """DeepSpeed's logger, as its ``utils/logging.py`` creates it."""
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
