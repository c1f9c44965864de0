"""Address of this host towards the others of a run."""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
from contextlib import suppress

from megasdc.common.wire import own_address_towards
from megasdc.engine.hooks import Run
from megasdc.parallel.collectives import gather_objects

logger = logging.getLogger(__name__)


def own_address(run: Run) -> str:
    """This host's address towards the first one; of the first one, whose name may mean itself alone, towards another.

    Where no other's name is known, its own name for itself stays. Empty where there is no way to the first: then this
    rank cannot listen, and all ranks report that.

    Collective: all ranks of the world.
    """
    names = gather_objects(socket.gethostname(), run.host_group)
    first = os.environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        own = own_address_towards(first)
    except OSError as error:
        logger.warning("this host's address is not known: %s", error)
        return ""
    if ipaddress.ip_address(own).is_loopback:
        for other in (name for name in names if name != names[run.dims.rank]):
            with suppress(OSError):  # that name is not known here
                return own_address_towards(other)
    return own
