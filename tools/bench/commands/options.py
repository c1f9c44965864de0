"""Options shared by benchmarks: sizes of a model, and speeds of an accelerator for which costs are predicted."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

Layers = Annotated[int, typer.Option("--layers", help="Transformer layers.")]
Sequence = Annotated[int, typer.Option("--sequence", help="Tokens of a sample.")]
Vocab = Annotated[int, typer.Option("--vocab", help="Entries of the vocabulary.")]
MicroBatch = Annotated[int, typer.Option("--micro-batch", help="Samples of a micro-batch.")]
Accumulation = Annotated[int, typer.Option("--accumulation", help="Micro-batches of a step.")]
Threads = Annotated[int, typer.Option("--threads", help="CPU threads of a rank.")]
Precision = Annotated[Literal["fp32", "bf16"], typer.Option("--precision", help="Type of parameters.")]
Bandwidth = Annotated[
    float, typer.Option("--bandwidth", min=1.0, help="Accelerator: GB/s at which checks read; 0.8 of an H100's.")
]
Tflops = Annotated[
    float, typer.Option("--tflops", min=0.1, help="Accelerator: TFLOP/s that training reaches; 40 % of an H100's.")
]
CallUs = Annotated[
    float, typer.Option("--call-us", min=0.0, help="Accelerator: microseconds to launch one check of a result.")
]
