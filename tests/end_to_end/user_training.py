"""A training that is not megasdc's own, as users have them: it goes on from its last checkpoint, and knows no megasdc.

Faults are files ``fault_KIND_RANK_STEP`` in the working folder: hang, kill, fail, flip (a weight is another one). Each
happens once. A file ``wrong``
names hosts whose results are wrong, always. With ``--guard FILE`` it has a guard.
"""

import argparse
import hashlib
import os
import pathlib
import signal
import socket
import time

import deepspeed
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--guard")
arguments = parser.parse_args()

torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))
config = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}
engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
if arguments.guard:
    import megasdc

    megasdc.attach(engine, arguments.guard)
if os.path.exists("checkpoints/latest"):
    engine.load_checkpoint("checkpoints")
wrong = pathlib.Path("wrong")
if wrong.exists() and socket.gethostname() in wrong.read_text().split():
    model[2].register_forward_hook(lambda module, args, output: output * 1.01)


def fault(kind: str) -> bool:
    """Whether a fault is due."""
    file = pathlib.Path(f"fault_{kind}_{engine.global_rank}_{engine.global_steps}")
    if due := file.exists():
        file.unlink()
    return due


while engine.global_steps < arguments.steps:
    draw = torch.Generator().manual_seed(engine.global_steps * 100 + engine.global_rank)
    loss = engine(torch.randn(2, 8, generator=draw)).pow(2).mean()
    engine.backward(loss)
    engine.step()
    if engine.global_steps % 5 == 0:
        engine.save_checkpoint("checkpoints")
    if engine.global_rank == 0:
        print("took step", engine.global_steps, flush=True)
    if fault("hang"):
        time.sleep(1000)
    if fault("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    if fault("flip"):
        model[0].weight.data[0, 0] *= 2
    if fault("fail"):
        raise ValueError("a bug of the user's")
    time.sleep(0.1)

if engine.global_rank == 0:
    digest = hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in model.parameters())).hexdigest()
    print("trained to", digest, flush=True)
