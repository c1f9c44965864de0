"""Where the numbers of ``metrics.jsonl`` are shown: TensorBoard, W&B, CSV, Prometheus; each can be rebuilt from it."""
