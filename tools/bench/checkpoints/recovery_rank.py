"""A rank of a drill of recovery: trains as the entry script does, on a host of a name of its own where it is given one.

``python -m tools.bench.checkpoints.recovery_rank CONFIG [HOST]``
"""

from __future__ import annotations

import sys

from tools.bench.small.drill import name_host, train_and_leave

if __name__ == "__main__":
    config, *names = sys.argv[1:]
    for name in names:
        name_host(name)
    train_and_leave(config)
