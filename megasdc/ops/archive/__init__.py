"""The archive of checkpoints: content-addressed, compressed blocks in any store that fsspec reaches."""
