"""Last of a fork server's preloaded modules: freezes all objects, so that no fork's garbage collection visits them.

A visit would also copy the memory pages of all these objects into the fork.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
