"""Data pipeline: sources, tokenizer, preparation, dataset, and a loader with a saved position."""
