"""Where is DeepSpeed's CPU operator, and how does a rank load it without waiting for anybody?

PyTorch takes a lock file whenever it loads an extension, built or not. A process that is killed in that moment leaves
the file behind, and every later process waits for ever without a word. An operator that ``megasdc`` has built carries a
stamp, by which a rank knows that there is nothing to build and that no lock is needed.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path

EXTENSIONS_VARIABLE = "TORCH_EXTENSIONS_DIR"
OPERATOR = "deepspeed_shm_comm"
STAMP = "megasdc_built.json"


def default_extensions_dir() -> str:
    """Return the folder of compiled operators that belongs to this Python environment alone.

    PyTorch's own default is shared by all environments of a user, whose different ninja versions rebuild it in turn.
    """
    return os.path.join(sys.prefix, "torch_extensions")


def extensions_dir() -> str:
    """The folder of compiled operators: the user's choice, else one for each Python environment."""
    return os.environ.get(EXTENSIONS_VARIABLE, default_extensions_dir())


def load_built_operator() -> bool:
    """Load the operator, unless this environment has to build it first: ``init_distributed`` then does, with a lock.

    Returns:
        Whether it is loaded.
    """
    from deepspeed.ops.op_builder.builder import OpBuilder
    from torch.utils.cpp_extension import _import_module_from_library

    folder = Path(extensions_dir()) / OPERATOR
    if not _is_stamped(folder):
        return False
    if OPERATOR not in OpBuilder._loaded_ops:
        OpBuilder._loaded_ops[OPERATOR] = _import_module_from_library(OPERATOR, str(folder), True)
    return True


def _is_stamped(folder: Path) -> bool:
    """Tell whether the stamp is of the library that lies there, and of this Python, torch and DeepSpeed."""
    try:
        stamp = json.loads((folder / STAMP).read_text(encoding="utf-8"))
        size = (folder / f"{OPERATOR}.so").stat().st_size
    except (OSError, ValueError):
        return False
    versions = {name: importlib.metadata.version(name) for name in ("torch", "deepspeed")}
    return bool(
        (stamp["library"], stamp["python"]) == (size, platform.python_version())
        and versions.items() <= stamp["versions"].items()
    )
