"""What tests of the real launcher share with those of several ranks: helpers, and the processors."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
DISTRIBUTED = HERE.parent / "distributed"
sys.path.append(str(DISTRIBUTED))  # harness


@pytest.fixture(scope="session")
def programs() -> Iterator[Path]:
    """``python`` and ``megasdc`` whose processes, on test hosts too, are forks of a server: see ``forked_programs``."""
    from harness import forked_programs

    with tempfile.TemporaryDirectory() as folder, forked_programs(Path(folder)) as programs:
        yield programs


@pytest.fixture(scope="session")
def shm_operator() -> Path:
    """Folder of extensions with DeepSpeed's operator for CPUs, which every plain DeepSpeed program there needs.

    To compile it takes such a program longer than trainings may stand still; here once, with ``lean_headers``.
    """
    from megasdc.parallel.local_ranks import EXTENSIONS_VARIABLE, base_environment

    environment = base_environment(1)
    if not list(Path(environment[EXTENSIONS_VARIABLE]).glob("deepspeed_shm_comm/*.so")):
        code = "from deepspeed.comm.torch import build_shm_op; build_shm_op()"
        paths = os.pathsep.join(filter(None, [str(HERE / "lean_headers"), os.environ.get("CPATH")]))
        command = [sys.executable, "-c", code]
        subprocess.run(command, env={**environment, "CPATH": paths}, check=True, timeout=300)
    return Path(environment[EXTENSIONS_VARIABLE])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of launches, which wait for most of their time, stand evenly between those of tests with ranks."""
    launches = list(dict.fromkeys(one.path for one in items if one.path.parent == HERE))
    ranks = list(dict.fromkeys(one.path for one in items if one.path.parent == DISTRIBUTED))
    places = {path: float(number) for number, path in enumerate(ranks)}
    places |= {path: number * len(ranks) / len(launches) - 0.5 for number, path in enumerate(launches)}
    items.sort(key=lambda one: places.get(one.path, len(ranks)))
