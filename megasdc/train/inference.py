"""What does a trained model say? Loss on a split, and text, on one process from a checkpoint of any layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from megasdc.checkpoint.export_hf import find_tokenizer
from megasdc.checkpoint.initial import InitialWeights, check_vocabulary
from megasdc.checkpoint.logical import WeightSource, load_weights, open_weights
from megasdc.checkpoint.progress import progress_bar
from megasdc.config import RunConfig, load_config, parse_config
from megasdc.data.dataset import build_split
from megasdc.data.loader import EvalLoader
from megasdc.data.manifest import Manifest
from megasdc.errors import ConfigError, DataError
from megasdc.model.loss import TokenLoss
from megasdc.model.transformer_config import padded_vocab_size
from megasdc.model.whole import WholeModel
from megasdc.parallel import groups

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class EvalResult:
    """Loss of a model on a split.

    Attributes:
        source: the folder that was read.
        step: its optimizer step; null: initial weights.
        split: ``train``, ``valid`` or ``test``.
        samples: number of samples, from the beginning of the split's stream.
        tokens: tokens used.
        loss: mean over them, nats a token.
        perplexity: its exponential.
    """

    source: str
    step: int | None
    split: str
    samples: int
    tokens: int
    loss: float
    perplexity: float

    def render(self) -> str:
        """The same for people."""
        of = "initial weights" if self.step is None else f"step {self.step}"
        return (
            f"{self.source} ({of}), {self.split}: loss {self.loss:.6f} nats/token, perplexity {self.perplexity:.4f}, "
            f"{self.samples} samples, {self.tokens:,} tokens"
        )


@dataclass(frozen=True)
class GenerateResult:
    """A continuation.

    Attributes:
        source: the folder that was read.
        step: its optimizer step; null: initial weights.
        prompt: as given.
        text: what the model adds.
        prompt_tokens: ids of the prompt.
        tokens: ids of what it adds, the end-of-document one included.
        stopped: ``end of document``, or ``max tokens``.
    """

    source: str
    step: int | None
    prompt: str
    text: str
    prompt_tokens: list[int]
    tokens: list[int]
    stopped: str


def evaluate_weights(
    source: Path | str,
    *,
    config_path: Path | str | None = None,
    split: Literal["train", "valid", "test"] = "valid",
    samples: int | None = None,
    overrides: Sequence[str] = (),
    progress: bool = False,
) -> EvalResult:
    """Compute the loss on the first samples of a split, the ones that a run's own evaluation uses.

    Args:
        source: a checkpoint of any layout, a folder of checkpoints (newest whole one), or imported initial weights.
        config_path: configuration that names the data; needed for initial weights, null: that of the checkpoint.
        split: which documents.
        samples: how many; null: ``training.eval_samples``.
        overrides: texts ``a.b.c=value``.
        progress: draw a bar on standard error where it is a terminal.

    Raises:
        ConfigError: no configuration, a wrong one, or another vocabulary than the data's.
        CheckpointError: no usable weights.
        DataError: the data are missing or damaged.
    """
    weights = open_weights(source, progress=progress)
    config = _config_of(weights, config_path, overrides)
    sections = config.megasdc
    if isinstance(weights, InitialWeights):
        check_vocabulary(weights, Manifest.load(sections.data.path), sections.data.path)
    elif weights.tokenizer_checksum not in (None, now := Manifest.load(sections.data.path).tokenizer.checksum):
        raise DataError(
            f"megasdc.data.path: {sections.data.path} was prepared with a tokenizer of checksum {now}, {weights.path} "
            f"was trained with {weights.tokenizer_checksum}; give data of the same tokenizer"
        )
    if sections.data.sequence_length > weights.model.max_positions:
        raise ConfigError(
            f"megasdc.data.sequence_length: got {sections.data.sequence_length}; {weights.path} has max_positions "
            f"{weights.model.max_positions}."
        )
    count = sections.training.eval_samples if samples is None else samples
    stream = build_split(sections.data, weights.vocab_size, split, count)
    size = config.deepspeed.get("train_micro_batch_size_per_gpu") or 1
    batches = EvalLoader(stream, size, 0, 1, count)
    total = tokens = 0.0
    with groups.single_process(), torch.inference_mode(), progress_bar("evaluating", len(batches), progress) as advance:
        model = _build(weights, DTYPES[config.precision])
        device = next(model.parameters()).device
        padded = padded_vocab_size(weights.vocab_size, weights.model.vocab_multiple)
        per_token = TokenLoss(weights.vocab_size, padded, 0, 1).per_token
        for ids, (labels, mask) in batches:
            losses = per_token(model(ids.to(device)), labels.to(device))
            total += float((losses.cpu().double() * mask).sum())
            tokens += float(mask.sum())
            advance()
    loss = total / tokens if tokens else math.nan
    return EvalResult(str(weights.path), weights.step, split, count, round(tokens), loss, math.exp(min(loss, 700.0)))


def generate(
    source: Path | str,
    prompt: str,
    *,
    max_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int = 0,
    seed: int = 0,
    tokenizer: Path | str | None = None,
    progress: bool = False,
) -> GenerateResult:
    """Continue a text; everything is computed anew for each token.

    Args:
        source: a checkpoint of any layout, a folder of checkpoints (newest whole one), or imported initial weights.
        prompt: the text; empty: the beginning of a document.
        max_tokens: most tokens to add; the model sees the last ``max_positions`` ones.
        temperature: logits are divided by it before one is drawn; 0: the most probable one is taken.
        top_k: draw among so many most probable ones; 0: among all.
        seed: of the draws.
        tokenizer: folder or file; null: the one that belongs to the weights.
        progress: draw a bar on standard error where it is a terminal.

    Raises:
        ConfigError: a number out of range.
        CheckpointError: no usable weights.
        DataError: the tokenizer is missing or another one.
    """
    wrong = {"--max-tokens": max_tokens < 1, "--temperature": not 0 <= temperature < math.inf, "--top-k": top_k < 0}
    if problems := [f"{name}: out of range, see --help." for name, bad in wrong.items() if bad]:
        raise ConfigError(problems)
    weights = open_weights(source, progress=progress)
    words = find_tokenizer(weights, tokenizer)
    ids = words.encode([prompt])[0]
    context = list(ids) or [words.end_of_document]
    added: list[int] = []
    generator = torch.Generator().manual_seed(seed)
    with groups.single_process(), torch.inference_mode(), progress_bar("generating", max_tokens, progress) as advance:
        model = _build(weights, next(iter(weights.layer(0, "meta").values())).dtype)
        device = next(model.parameters()).device
        while len(added) < max_tokens and (not added or added[-1] != words.end_of_document):
            seen = torch.tensor([context[-model.max_positions :]], device=device)
            logits = model(seen)[-1, 0, : words.vocab_size].float().cpu()
            context.append(pick(logits, temperature, top_k, generator))
            added.append(context[-1])
            advance()
    return GenerateResult(
        source=str(weights.path),
        step=weights.step,
        prompt=prompt,
        text=words.decode(added),
        prompt_tokens=list(ids),
        tokens=added,
        stopped="end of document" if added[-1] == words.end_of_document else "max tokens",
    )


def pick(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """Choose the next token.

    Args:
        logits: [v], fp32 on the host.
        temperature: as in ``generate``.
        top_k: as in ``generate``.
        generator: gives the draw.
    """
    if temperature == 0:
        return int(logits.argmax())
    if 0 < top_k < logits.numel():
        least = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < least, -math.inf)
    return int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))


def _build(weights: WeightSource, dtype: torch.dtype) -> WholeModel:
    model = WholeModel(weights.model, vocab_size=weights.vocab_size, dtype=dtype)
    load_weights(weights, model.pipeline_parameters(), weights.model, vocab_size=weights.vocab_size)
    return model.to("cuda") if torch.cuda.is_available() else model


def _config_of(weights: WeightSource, path: Path | str | None, overrides: Sequence[str]) -> RunConfig:
    if path is not None:
        return load_config(path, overrides)
    if weights.config is None:
        raise ConfigError(f"{weights.path} holds initial weights, which name no data: give --config F.json")
    return parse_config(weights.config, overrides, str(weights.path))
