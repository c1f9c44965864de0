"""Use of a checkpoint of any layout, on one process: loss on a split, and generated text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from megasdc.checkpoint.weights import InitialWeights, WeightSource, check_vocabulary, load_weights, open_weights
from megasdc.common.errors import ConfigError, DataError
from megasdc.common.program import parts_bar, why_unreadable
from megasdc.config.data import DataSection
from megasdc.config.load import RunConfig, load_config, parse_config
from megasdc.data.dataset import BlendedTokens, TokenDataset, build_split
from megasdc.data.loader import EvalLoader
from megasdc.data.manifest import DataManifest, unchecked
from megasdc.data.tokenizer import Tokenizer
from megasdc.interchange.export_hf import beginning_of_document, find_tokenizer
from megasdc.model.loss import TokenLoss
from megasdc.model.pipeline import WholeModel
from megasdc.model.sizes import padded_vocab_size
from megasdc.parallel import groups

USED_KEYS = (
    "megasdc.data",
    "megasdc.training.eval_samples",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "bf16",
    "fp16",
)
"""Configuration keys that an evaluation depends on, besides the model's."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class EvalResult:
    """Loss of a model on a split: the mean over ``tokens`` in nats a token, its exponential, and remarks on both.

    ``step``: step of the weights, None: initial ones; ``samples``: number of samples, from the beginning of the split's
    stream.
    """

    source: str
    step: int | None
    split: str
    samples: int
    tokens: int
    loss: float
    perplexity: float
    notes: list[str]

    def render(self) -> str:
        """The result as text for people."""
        of = "initial weights" if self.step is None else f"step {self.step}"
        return "\n".join(
            [
                f"{self.source} ({of}), {self.split}: loss {self.loss:.6f} nats/token, "
                f"perplexity {self.perplexity:.4f}, {self.samples} samples, {self.tokens:,} tokens",
                *(f"note: {note}" for note in self.notes),
            ]
        )


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

    No sample counts twice: where a split holds fewer than requested, all of them are used, and a note says so; a blend
    is used until its first part has no more samples, so that the shares stay those of its weights. Imported weights
    with more embedding rows than their tokenizer has entries have all rows in the softmax, as in ``transformers``,
    which a note says too; a training run that starts from them excludes the additional rows.

    Args:
        source: a checkpoint of any layout, a folder of checkpoints (newest complete one), or imported initial weights.
        config_path: configuration that names the data; needed for initial weights; None: that of the checkpoint.
        split: name of the split of the documents.
        samples: largest number of samples; None: ``training.eval_samples``.
        overrides: changes of the keys in ``USED_KEYS``, as texts ``a.b.c=value``.
        progress: whether a bar is drawn on standard error, where it is a terminal.

    Raises:
        ConfigError: no configuration, a wrong one, or another vocabulary than the data's.
        CheckpointError: no usable weights.
        DataError: the data are missing or damaged.
    """
    _check_overrides(overrides)
    weights = open_weights(source, progress=progress)
    config = _config_of(weights, config_path, overrides)
    sections = config.megasdc
    if config_path is None:
        _check_data(weights, sections.data)
    if isinstance(weights, InitialWeights):
        check_vocabulary(weights, DataManifest.load(sections.data.path), sections.data.path)
    elif weights.tokenizer_checksum not in (None, now := DataManifest.load(sections.data.path).tokenizer.checksum):
        raise DataError(
            f"megasdc.data.path: {sections.data.path} was prepared with a tokenizer of checksum {now}, {weights.path} "
            f"was trained with {weights.tokenizer_checksum}; give data of the same tokenizer"
        )
    if sections.data.sequence_length > weights.model.max_positions:
        raise ConfigError(
            f"megasdc.data.sequence_length: got {sections.data.sequence_length}; {weights.path} has max_positions "
            f"{weights.model.max_positions}."
        )
    wanted = sections.training.eval_samples if samples is None else samples
    stream = build_split(sections.data, weights.vocab_size, split, wanted)
    count = min(wanted, stream.num_distinct)
    size = config.deepspeed.get("train_micro_batch_size_per_gpu") or 1
    batches = EvalLoader(stream, size, 0, 1, count)
    total = tokens = 0.0
    with (
        groups.single_process(),
        torch.inference_mode(),
        parts_bar("evaluating", len(batches), quiet=not progress) as advance,
    ):
        model = build_model(weights, DTYPES[config.precision])
        device = next(model.parameters()).device
        padded = padded_vocab_size(weights.vocab_size, weights.model.vocab_multiple)
        per_token = TokenLoss(weights.vocab_size, padded, 0, 1).per_token
        for ids, (labels, mask) in batches:
            losses = per_token(model(ids.to(device)), labels.to(device))
            total += float((losses.cpu().double() * mask).sum())
            tokens += float(mask.sum())
            advance()
    loss = total / tokens if tokens else math.nan
    return EvalResult(
        source=str(weights.path),
        step=weights.step,
        split=split,
        samples=count,
        tokens=round(tokens),
        loss=loss,
        perplexity=math.exp(min(loss, 700.0)),
        notes=[*_unchecked(sections.data), *_notes(weights, split, wanted, stream)],
    )


def build_model(weights: WeightSource, dtype: torch.dtype) -> WholeModel:
    """The whole model with these weights, on this process's device."""
    model = WholeModel(weights.model, vocab_size=weights.vocab_size, dtype=dtype)
    load_weights(weights, model.pipeline_parameters(), weights.model, vocab_size=weights.vocab_size)
    return model.to("cuda") if torch.cuda.is_available() else model


def _check_overrides(overrides: Sequence[str]) -> None:
    """Refuse overrides that an evaluation does not use, with a ConfigError."""
    keys = [text.partition("=")[0] for text in overrides]
    unused = [key for key in keys if not any(key == used or key.startswith(f"{used}.") for used in USED_KEYS)]
    if unused:
        raise ConfigError(
            [f"{key}: has no effect here; the weights come with their own model." for key in unused]
            + [f"An evaluation reads {', '.join(USED_KEYS)}."],
            "--set",
        )


def _check_data(weights: WeightSource, section: DataSection) -> None:
    """Raise a DataError with a remedy where the data that a checkpoint names are missing or unreadable."""
    for folder in [section.path, *(part.path for part in section.blend)]:
        if problem := why_unreadable(folder):
            raise DataError(f"data {folder} {problem}")
        if not Path(folder).exists():
            raise DataError(
                f"the data {folder} of {weights.path} do not exist; name them with --set megasdc.data.path=DIR, or "
                "start in the folder that the run was started in"
            )


def _unchecked(section: DataSection) -> list[str]:
    found = (unchecked(folder, DataManifest.load(folder)) for folder in section.folders)
    return [text for text in found if text is not None]


def _notes(weights: WeightSource, split: str, wanted: int, stream: TokenDataset | BlendedTokens) -> list[str]:
    notes = []
    part = stream.first_used_up if isinstance(stream, BlendedTokens) else None
    count = stream.num_distinct
    if count < wanted and part is not None:
        notes.append(
            f"{wanted} samples were asked for; the blend's {split} was used for {count}, up to where its first part is "
            f"used up: {part.path} holds {part.num_distinct} of this length; each was used once"
        )
    elif count < wanted:
        notes.append(f"{wanted} samples were asked for; {split} holds {count} of this length, each was used once")
    if isinstance(weights, InitialWeights):
        entries = weights.manifest.tokenizer_vocab_size
        if entries is not None and entries < weights.vocab_size:
            notes.append(
                f"the softmax is over all {weights.vocab_size} rows of the embedding, as in transformers, of which the "
                f"tokenizer has {entries}; a training run excludes the others"
            )
    return notes


def _config_of(weights: WeightSource, path: Path | str | None, overrides: Sequence[str]) -> RunConfig:
    if path is not None:
        return load_config(path, overrides)
    if weights.config is None:
        raise ConfigError(f"{weights.path} holds initial weights, which name no data: give --config F.json")
    return parse_config(weights.config, overrides, str(weights.path), stored=True)


MAX_SEED = 2**64 - 1


@dataclass(frozen=True)
class GenerateResult:
    """A generated continuation, with the ids of its tokens, the end-of-document one included.

    ``step``: step of the weights, None: initial ones; ``stopped``: ``end of document``, or ``max tokens``.
    """

    source: str
    step: int | None
    prompt: str
    text: str
    prompt_tokens: list[int]
    tokens: list[int]
    stopped: str


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
    """Continue a text; the whole context is recomputed for each token (no key-value cache).

    Args:
        source: a checkpoint of any layout, a folder of checkpoints (newest complete one), or imported initial weights.
        prompt: the text; empty: the beginning of a document.
        max_tokens: largest number of tokens to add; the model sees the last ``max_positions`` ones.
        temperature: divides the logits before sampling; 0: the most probable token is taken.
        top_k: number of the most probable tokens that are sampled from; 0: all.
        seed: seed of the sampling.
        tokenizer: folder or file of the tokenizer; None: the one that belongs to the weights.
        progress: whether a bar is drawn on standard error, where it is a terminal.

    Raises:
        ConfigError: a number out of range.
        CheckpointError: no usable weights.
        DataError: the tokenizer is missing or another one.
    """
    wrong = {
        "--max-tokens": max_tokens < 1,
        "--temperature": not 0 <= temperature < math.inf,
        "--top-k": top_k < 0,
        "--seed": not 0 <= seed <= MAX_SEED,
    }
    if problems := [f"{name}: out of range, see --help." for name, bad in wrong.items() if bad]:
        raise ConfigError(problems)
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"--prompt: holds bytes that are not UTF-8, at character {error.start}; give text in UTF-8"
        ) from error
    weights = open_weights(source, progress=progress)
    words = find_tokenizer(weights, tokenizer)
    beginning = beginning_of_document(weights, words)
    ids = [*([] if beginning is None else [beginning]), *words.encode([prompt])[0]]
    context = list(ids) or [words.end_of_document]
    added: list[int] = []
    generator = torch.Generator().manual_seed(seed)
    with (
        groups.single_process(),
        torch.inference_mode(),
        parts_bar("generating", max_tokens, quiet=not progress) as advance,
    ):
        model = build_model(weights, next(iter(weights.layer(0, "meta").values())).dtype)
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
        text=_continuation(words, ids, added),
        prompt_tokens=list(ids),
        tokens=added,
        stopped="end of document" if added[-1] == words.end_of_document else "max tokens",
    )


def _continuation(words: Tokenizer, ids: Sequence[int], added: Sequence[int]) -> str:
    """The text that tokens add to a prompt; decoded alone they could lose a leading space."""
    before, whole = words.decode(ids), words.decode([*ids, *added])
    return whole.removeprefix(before) if whole.startswith(before) else words.decode(added)


def pick(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """Choose the next token from fp32 logits on the host, [v]; temperature and top_k as in ``generate``."""
    if temperature == 0:
        return int(logits.argmax())
    if 0 < top_k < logits.numel():
        least = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < least, -math.inf)
    scaled = (logits - logits.max()).double() / temperature  # at most 0, so that a low temperature cannot overflow
    return int(torch.multinomial(scaled.softmax(-1), 1, generator=generator))
