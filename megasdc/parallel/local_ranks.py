"""Which environment does a rank need that this process starts itself, without the launcher?"""

from __future__ import annotations

import os
import subprocess
import sys

from megasdc.errors import MegasdcError

TAIL_CHARACTERS = 3000


def base_environment(threads: int) -> dict[str, str]:
    """This process's environment as a run has it, and with this Python environment's own tools first on PATH.

    DeepSpeed's CPU operator is compiled again, for half a minute, whenever another ``ninja`` than the last one is
    found first.

    Args:
        threads: CPU threads of a rank; 0 leaves the choice.
    """
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")},
        "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)]),
        "TORCH_EXTENSIONS_DIR": extensions_dir(),
        "THP_MEM_ALLOC_ENABLE": os.environ.get("THP_MEM_ALLOC_ENABLE", "1"),  # as launch/pretrain_gpt.py sets it
    }
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    return environment


def rank_environment(rank: int, ranks: int, threads: int, host: str, port: int) -> dict[str, str]:
    """What a launcher would set for a rank, on top of ``base_environment``.

    Args:
        rank: in the world.
        ranks: size of the world.
        threads: CPU threads of the rank; 0 leaves the choice.
        host: of the rendezvous.
        port: of the rendezvous.
    """
    return {
        **base_environment(threads),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }


def extensions_dir() -> str:
    """The folder of DeepSpeed's compiled operators: the user's choice, else one for each Python environment."""
    return os.environ.get("TORCH_EXTENSIONS_DIR", os.path.join(sys.prefix, "torch_extensions"))


def build_operator() -> None:
    """Compile DeepSpeed's CPU operator if need be, in a process of its own; done before, it takes some seconds.

    Raises:
        MegasdcError: it cannot be compiled.
    """
    code = "from deepspeed.comm.torch import build_shm_op; build_shm_op()"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=base_environment(1), capture_output=True, text=True, check=False)
    if done.returncode:
        raise MegasdcError(f"DeepSpeed's CPU operator could not be compiled:\n{done.stderr[-TAIL_CHARACTERS:]}")
