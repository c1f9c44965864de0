"""Last of a fork server's preloaded modules: freezes all objects, so that no fork's garbage collection visits them.

A visit would also copy the memory pages of all these objects into the fork. From now on ``lean`` leaves nothing out.
"""

import gc

from megasdc.common.imports.kept import allow

allow()
gc.collect()
gc.freeze()
