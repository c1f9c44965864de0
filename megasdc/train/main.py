"""How does one training rank start and end? From a configuration file to an exit code."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Sequence

from megasdc.config import RunConfig, check_layout, find_warnings, load_config
from megasdc.errors import MegasdcError, PeerError

logger = logging.getLogger("megasdc")

PEER_SIGNS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
    "Timed out waiting",
)
"""What a collective says when another rank has gone (gloo and NCCL, torch 2.13)."""


def pretrain(config_path: str, overrides: Sequence[str]) -> tuple[int, BaseException | None, RunConfig | None]:
    """Train as one rank of a run.

    Args:
        config_path: the JSON file.
        overrides: texts ``a.b.c=value``.

    Returns:
        The exit code, the error behind it if there is one, and the configuration if it could be read.

    Collective: all ranks of the world.
    """
    started_at = time.monotonic()
    rank = int(os.environ.get("RANK", "0"))
    set_up_logging(rank)
    config = None
    try:
        config = load_config(config_path, overrides)
        check_layout(config, int(os.environ.get("WORLD_SIZE", "1")))
        if rank == 0:
            for warning in find_warnings(config):
                logger.warning("%s", warning)
        _train(config, started_at)
    except MegasdcError as error:
        logger.error("%s", error)
        return error.exit_code, error, config
    except Exception as error:
        if any(sign in str(error) for sign in PEER_SIGNS):
            peer = PeerError(f"a collective failed because another rank has gone: {str(error).splitlines()[0]}")
            logger.error("%s", peer)
            return peer.exit_code, peer, config
        logger.error("unexpected error\n%s", traceback.format_exc())
        return 1, error, config
    return 0, None, config


def _train(config: RunConfig, started_at: float) -> None:
    from megasdc.parallel import groups
    from megasdc.train.build import build_run
    from megasdc.train.run import train
    from megasdc.train.startup import StartClock

    built = build_run(config, StartClock(started_at))
    run = built.run
    if run.dims.rank == 0:
        logger.info("ready after %.1f s, at step %d of %d", time.monotonic() - started_at, run.step, run.steps)
    train(run, built.hooks)
    if run.dims.rank == 0:
        reason = run.stop_reason or "all steps done"
        logger.info("stopped at step %d of %d: %s", run.step, run.steps, reason)
        run.events.emit("end", "run", step=run.step, reason=reason, results=json.loads(json.dumps(run.results)))
    run.events.close()
    groups.shutdown()


def set_up_logging(rank: int) -> None:
    """Send our own lines to standard error with a rank prefix, and keep libraries to warnings."""
    for name in ("DeepSpeed", "megatron", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.WARNING)
    os.environ.setdefault("DS_ACCELERATOR_LOG_LEVEL", "error")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s [rank {rank}] %(levelname).1s %(message)s", "%H:%M:%S"))
    root = logging.getLogger("megasdc")
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    root.propagate = False
