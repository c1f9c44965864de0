"""Guards of trainings that are not megasdc's own."""
