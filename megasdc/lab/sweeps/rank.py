"""Rank of a run of a sweep: trains as the entry script does, and ends with its exit code.

Started by ``megasdc.lab.sweeps.run_process``; the argument is the configuration file.
"""

from __future__ import annotations

import sys

from megasdc.train.main import pretrain

if __name__ == "__main__":
    sys.exit(pretrain(sys.argv[1], [])[0])
