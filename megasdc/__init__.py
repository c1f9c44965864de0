"""megasdc: pretrain Megatron-core GPT models under DeepSpeed ZeRO-1, right and on time on imperfect hardware."""

__version__ = "0.1.0"
