"""Two replicas of a small model in one process, whose results are compared and judged as those of two ranks are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megasdc.attached.audit import build_guard_referee
from megasdc.attached.batch_replayer import Batch, BatchReplayer, SentTensor
from megasdc.attached.record import ResultRecorder, choose_watched
from megasdc.common.addresses import Address
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.incident import Opinion
from megasdc.sdc.referee.referee import Hearing, judge_exhibits
from megasdc.sdc.trace import Trace
from megasdc.sdc.verdict import RankVerdict, find_differences, settle
from megasdc.sdc.vote import vote
from megasdc.tensors.checksum import default_algorithm
from tools.trainings.modules import OwnCode

SAMPLES, TOKENS, VOCAB, WIDTH, REPEATS = 2, 12, 64, 32, 3
DIMS = ParallelDims(1, 1, 2, 0)


def _llama(**more: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=48,
        max_position_embeddings=TOKENS,
        pad_token_id=0,
        **sizes,
        **more,
    )
    return LlamaForCausalLM(config)  # type: ignore[no-any-return]


def _gpt2(**more: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=VOCAB, n_embd=WIDTH, n_layer=2, n_head=4, n_positions=TOKENS, **more)
    return GPT2LMHeadModel(config)  # type: ignore[no-any-return]


def _bert(**more: Any) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=TOKENS,
        **more,
    )
    return BertForMaskedLM(config)  # type: ignore[no-any-return]


def _own_code(**_more: Any) -> nn.Module:
    return OwnCode(VOCAB, WIDTH)


MODELS: Mapping[str, Callable[..., nn.Module]] = {"llama": _llama, "gpt2": _gpt2, "bert": _bert, "own code": _own_code}
LIBRARY_MODELS = ("llama", "gpt2", "bert")
"""Of Hugging Face: those with faults."""
PRECISIONS: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "autocast": torch.float32,
}


def build_model(name: str, precision: str, seed: int, attention: str = "sdpa") -> nn.Module:
    """A model with weights that are drawn, also those that are 0 or 1 in the beginning."""
    torch.manual_seed(seed)
    model = MODELS[name](attn_implementation=attention).train()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.05)
    return model.to(PRECISIONS[precision])


@dataclass
class Side:
    """One replica.

    Args:
        around: made anew for each time that it computes.
    """

    rank: int
    model: nn.Module
    batch: Batch
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    probe: BatchReplayer = field(init=False)

    def __post_init__(self) -> None:
        recorder = ResultRecorder(self.model, choose_watched(self.model, None), default_algorithm(torch.device("cpu")))
        self.probe = BatchReplayer(self.model, torch.device("cpu"), recorder, 1, lambda: None)
        self.referee = build_guard_referee(self.model, self.probe, self.rank, None)
        recorder.listener = self.referee.listen

    def compute(self) -> Trace:
        """The batch, forward and backward."""
        with self.around():
            return self.probe.compute(self.batch, 1, uses=True)

    def show(self, address: Address, values: Mapping[int, int], place: int) -> Any:
        """What it shows of a result."""

        def repeat() -> dict[int, int]:
            return {self.rank: self.compute().checksums[place]}

        return self.referee.exhibits(address, values, repeat)


def draw_batch(precision: str, seed: int) -> Batch:
    """Tokens, some of which are padding."""
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (SAMPLES, TOKENS), generator=draw)
    tokens[0, :2] = 0
    given: dict[str, Tensor] = {"input_ids": tokens, "labels": tokens.roll(-1, 1)}
    autocast = torch.bfloat16 if precision == "autocast" else None
    return Batch((), {name: SentTensor(one, False, True) for name, one in given.items()}, autocast, {})


@dataclass(frozen=True)
class Judged:
    """What came of two replicas that differ.

    Args:
        address: of the first result that differs.
    """

    address: Address
    opinion: Opinion
    rulings: tuple[RankVerdict, ...]

    @property
    def named(self) -> list[int]:
        """Ranks that are named."""
        return [one.rank for one in self.rulings if one.rank is not None]


def judge_pair(sides: tuple[Side, Side]) -> Judged | None:
    """Compare two replicas, and judge where they differ; None: they do not."""
    traces = {side.rank: side.compute() for side in sides}
    ballot = vote(traces, DIMS)
    found = find_differences(ballot)
    if not found:
        return None
    (address, place, values), *_ = found
    repeats = {(side.rank, place): [side.compute().checksums[place] for _ in range(1)] for side in sides}
    opinion = _exchange([judge_exhibits(address, values, side.show(address, values, place)) for side in sides])
    refereed = {(rank, place): within for rank, within in opinion.within.items()}
    return Judged(address, opinion, settle(ballot, repeats, None, (), refereed, {place: opinion.basis}))


def _exchange(hearings: list[Hearing]) -> Opinion:
    """Let all ranks hear each other."""
    sent: list[Any] = [next(one) for one in hearings]
    while True:
        ends = [_next(one, sent) for one in hearings]
        if all(isinstance(one, _End) for one in ends):
            opinion: Opinion = ends[0].opinion
            assert all(one.opinion == opinion for one in ends), "ranks have the same opinion"
            return opinion
        sent = ends


@dataclass(frozen=True)
class _End:
    opinion: Opinion


def _next(hearing: Hearing, sent: list[Any]) -> Any:
    try:
        return hearing.send(sent)
    except StopIteration as end:
        return _End(end.value)
