"""Text to tokens to micro-batches: sources, tokenizer, preparation, dataset, and a loader with a saved position."""
