"""Save, resume, manifest, verify: a checkpoint is whole on every node, or it is not there."""
