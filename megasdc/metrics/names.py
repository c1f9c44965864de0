"""Metric names: every name that a run can write, with its unit and meaning."""

from __future__ import annotations

METRICS: dict[str, str] = {
    "train/loss": "mean loss over the tokens used since the last line, nats",
    "train/learning_rate": "learning rate of the last step",
    "train/grad_norm": "2-norm of the whole gradient before clipping, last step",
    "train/param_norm": "2-norm of all parameters, each counted once",
    "train/loss_scale": "loss scale of fp16 training",
    "train/tokens": "tokens used since the run began",
    "train/samples": "samples consumed since the run began",
    "data/stream_end": "position in the training stream after the samples consumed and skipped so far",
    "train/skipped_steps": "steps that the optimizer did not take since the run began",
    "bounds/share": "share of gradient elements that were bounded since the last line",
    "bounds/removed_share": "share of the sum of gradient magnitudes that bounds removed since the last line",
    "bounds/largest_ratio": "largest g^2 / V since the last line, before bounds",
    "bounds/non_finite": "NaN and Inf in gradients since the last line",
    "bounds/learning_rate_factor": "what the learning rate was multiplied by in the last step, after a momentum reset",
    "drops/micro_batches": "micro-batches dropped since the run began, all replicas",
    "drops/ended_passes": 'backward passes ended since the run began, all replicas; with granularity "backward"',
    "drops/rate": "share of the planned micro-batches dropped since the last line, all replicas; ended passes in part",
    "drops/threshold_s": "seconds after which a replica starts no micro-batch, last step; absent while there is none",
    "local_sgd/outer_norm": "norm of this replica's outer gradient, last round",
    "local_sgd/exchange_s": "seconds in which the last round waited for other replicas and fetched their weights",
    "speed/step_s": "mean seconds of a step since the last line, evaluations and saves left out",
    "speed/tokens_per_s": "tokens used per second, all ranks",
    "speed/tflops_per_device": "model arithmetic per second and rank, TFLOP/s, recomputation not counted",
    "speed/mfu_ratio": "that over the device's peak; absent where the peak is not known",
    "time/forward_s": "seconds a step in forward passes, rank 0",
    "time/backward_s": "seconds a step in backward passes, recomputation included, rank 0",
    "time/data_s": "seconds a step waiting for micro-batches, rank 0",
    "time/optimizer_s": "seconds a step in norm, clip, update and all-gather, rank 0",
    "time/garbage_collection_s": "seconds a step in Python's garbage collection, within the other parts, rank 0",
    "time/other_s": "the rest of a step: pipeline transfers, waiting, gradient reduction, rank 0",
    "sdc/replay_hidden_share": "share of the first stage's permuted replay that made the step no longer; in audits",
    "sdc/cost_share": "share of the last 100 steps' time inside checks and audits, slowest rank; with a budget",
    "health/slowest_ratio": "time of the slowest rank over that of its peers of the same stage, last 40 steps",
    "health/noise_ratio": "what is random in that from step to step, standard deviation over the mean, largest stage",
    "health/imbalance_ratio": "time of the slowest stage over the mean of all stages, last 40 steps",
    "memory/host_peak_bytes": "peak resident memory of rank 0",
    "memory/device_peak_bytes": "peak allocated device memory of rank 0; absent on CPU",
    "health/ping_ms": "longest round trip between two hosts; absent where no link is measured",
    "health/resent_share": "largest share of TCP segments of training from a host to another sent again; likewise",
    "eval/loss": "mean loss over the tokens of the validation samples, nats",
    "eval/perplexity": "exp of that",
    "time/eval_s": "seconds that training stood still for the evaluation",
    "checkpoint/save_s": "seconds that training stood still for a checkpoint",
    "checkpoint/written_s": "seconds from the step until the checkpoint was whole on the disk",
    "checkpoint/bytes": "size of the checkpoint",
    "memory/step": "newest step that all ranks hold in memory",
    "memory/stalled_s": "seconds that training stood still for the last snapshot in memory",
    "memory/skipped": "snapshots in memory that were due and not taken, since the one before was not whole yet",
    "memory/failed": "snapshots in memory that a rank could not take",
    "checkpoint/failed": "saves beside training that failed so far",
    "checkpoint/skipped": "saves that were skipped so far, because the one before was not written yet",
    "archive/push_s": "seconds that a push of a checkpoint into the archive took, beside training",
    "archive/stored_bytes": "bytes that it stored, compressed; what was there is not counted",
    "archive/failures": "pushes that failed since this start of the run",
}

PEAK_TFLOPS: dict[str, float] = {
    "A100": 312.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.4,
    "H200": 989.4,
    "B200": 2250.0,
}
"""Dense bf16 and fp16 peak of one device, TFLOP/s, by a part of its name; the longest match counts.

Source: NVIDIA's data sheets, without sparsity.
"""


def peak_tflops(device_name: str) -> float | None:
    """Dense bf16 and fp16 peak of a device, TFLOP/s; None where the name is not known."""
    fitting = [part for part in PEAK_TFLOPS if part in device_name]
    return PEAK_TFLOPS[max(fitting, key=len)] if fitting else None
