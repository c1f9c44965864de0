"""Protection of any training with DeepSpeed, its model and its loop left as they are: ``megasdc.attach``."""
