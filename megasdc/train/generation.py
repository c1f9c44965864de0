"""Text generation from a checkpoint of any layout, on one process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megasdc.checkpoint.views.logical import open_weights
from megasdc.common.errors import ConfigError
from megasdc.common.program import parts_bar
from megasdc.data.tokenizer import Tokenizer
from megasdc.interchange.export_hf import beginning_of_document, find_tokenizer
from megasdc.parallel import groups
from megasdc.train.inference import build_model

MAX_SEED = 2**64 - 1


@dataclass(frozen=True)
class GenerateResult:
    """A generated continuation, with the ids of its tokens, the end-of-document one included.

    ``step``: of the weights, None for initial ones; ``stopped``: ``end of document``, or ``max tokens``.
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
        max_tokens: most tokens to add; the model sees the last ``max_positions`` ones.
        temperature: divides the logits before sampling; 0: the most probable token is taken.
        top_k: sample among so many most probable tokens; 0: among all.
        seed: of the sampling.
        tokenizer: folder or file; None: the one that belongs to the weights.
        progress: draw a bar on standard error where it is a terminal.

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
