"""Multiple-choice questions, answered by a model: accuracy, and how often two models answer otherwise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megasdc.checkpoint.weights import open_weights
from megasdc.common.durable import parse_json
from megasdc.common.errors import DataError
from megasdc.common.program import parts_bar
from megasdc.data.tokenizer import Tokenizer
from megasdc.interchange.export_hf import beginning_of_document, find_tokenizer
from megasdc.model.pipeline import WholeModel
from megasdc.parallel import groups
from megasdc.train.inference import build_model

COVERAGE = 0.95
"""Least probability that an interval holds the true share."""


@dataclass(frozen=True)
class Question:
    """One question; ``answer``: index of the right choice; ``place``: its file and line, for messages."""

    prompt: str
    choices: tuple[str, ...]
    answer: int
    place: str


@dataclass(frozen=True)
class Answers:
    """Answers of one model.

    Args:
        step: of the weights; None: initial ones.
        interval: of the accuracy, 95 %, of Clopper and Pearson.
        undecided: questions with a log-probability that is not a number; they count as wrong.
        answers: index of the choice for each question; None: undecided.
        log_probabilities: summed over the choice's tokens, in nats, for each question and choice.
    """

    source: str
    step: int | None
    accuracy: float
    interval: tuple[float, float]
    undecided: int
    answers: list[int | None]
    log_probabilities: list[list[float]]

    def differing(self, other: Answers) -> int:
        """Questions that another model answers differently."""
        return sum(one != two for one, two in zip(self.answers, other.answers, strict=True))

    def as_dict(self) -> dict[str, Any]:
        """As plain values, without log-probabilities."""
        kept = ("source", "step", "accuracy", "interval", "undecided", "answers")
        return {name: getattr(self, name) for name in kept}

    def render(self) -> str:
        """As a line for people."""
        of = "initial weights" if self.step is None else f"step {self.step}"
        undecided = f", {self.undecided} undecided" if self.undecided else ""
        return f"{self.source} ({of}): accuracy {_percent(self.accuracy, self.interval)}{undecided}"


@dataclass(frozen=True)
class ChoicesResult:
    """Answers of a model to the questions of a file, and where another one was asked too, of that and how both differ.

    ``disagreement``: share of questions that the two answer differently, with its 95 % interval.
    """

    file: str
    questions: int
    model: Answers
    against: Answers | None
    disagreement: float | None
    disagreement_interval: tuple[float, float] | None

    def as_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "file": self.file,
            "questions": self.questions,
            "model": self.model.as_dict(),
            "against": None if self.against is None else self.against.as_dict(),
            "disagreement": self.disagreement,
            "disagreement_interval": self.disagreement_interval,
        }

    def render(self) -> str:
        """As text for people."""
        plural = "" if self.questions == 1 else "s"
        lines = [f"{self.file}: {self.questions:,} question{plural}", self.model.render()]
        if self.against is not None and self.disagreement is not None and self.disagreement_interval is not None:
            lines.append(self.against.render())
            lines.append(f"answered differently: {_percent(self.disagreement, self.disagreement_interval)}")
        return "\n".join(lines)


def evaluate_choices(
    source: Path | str,
    file: Path | str,
    *,
    against: Path | str | None = None,
    tokenizer: Path | str | None = None,
    progress: bool = False,
) -> ChoicesResult:
    """Let a model answer multiple-choice questions, and compare it with another.

    A model's answer is the choice with the largest sum of the log-probabilities of its tokens, given the prompt; of
    equal sums, the first. Sums are not divided by the length, so a longer choice is less probable as such; give choices
    of like length. Tokens are those of prompt and choice as one text, since at the border of both a token may hold
    parts of both: the choice's are those after what the prompt alone and all of its choices have in common.

    Args:
        source: a checkpoint of any layout, a folder of checkpoints (newest complete one), or imported initial weights.
        file: JSON lines, see ``read_questions``.
        against: weights likewise, asked too; None: none.
        tokenizer: folder or file, for both; None: the one that belongs to the weights.
        progress: draw bars on standard error where it is a terminal.

    Raises:
        CheckpointError: no usable weights.
        DataError: the file or the tokenizer is missing or wrong, or a question is too long for the model.
    """
    questions = read_questions(file)
    model, other = (
        None if weights is None else answer_questions(weights, questions, tokenizer=tokenizer, progress=progress)
        for weights in (source, against)
    )
    assert model is not None, "a source is given"
    share = None if other is None else model.differing(other)
    return ChoicesResult(
        file=str(file),
        questions=len(questions),
        model=model,
        against=other,
        disagreement=None if share is None else share / len(questions),
        disagreement_interval=None if share is None else share_interval(share, len(questions)),
    )


def answer_questions(
    source: Path | str,
    questions: Sequence[Question],
    *,
    tokenizer: Path | str | None = None,
    progress: bool = False,
) -> Answers:
    """The answers of one model; see ``evaluate_choices``."""
    weights = open_weights(source, progress=progress)
    words = find_tokenizer(weights, tokenizer)
    beginning = beginning_of_document(weights, words)
    texts = [tokens_of(words, question, weights.model.max_positions, beginning) for question in questions]
    found = []
    with (
        groups.single_process(),
        torch.inference_mode(),
        parts_bar("asking", len(questions), quiet=not progress) as advance,
    ):
        model = build_model(weights, next(iter(weights.layer(0, "meta").values())).dtype)
        for tokens, given in texts:
            found.append(log_probabilities(model, tokens, given))
            advance()
    answers = [_largest(sums) for sums in found]
    correct = sum(answer == question.answer for answer, question in zip(answers, questions, strict=True))
    return Answers(
        source=str(weights.path),
        step=weights.step,
        accuracy=correct / len(questions),
        interval=share_interval(correct, len(questions)),
        undecided=answers.count(None),
        answers=answers,
        log_probabilities=found,
    )


def read_questions(file: Path | str) -> list[Question]:
    """The questions of a file: a JSON object a line, ``{"prompt": str, "choices": [str, ...], "answer": int}``.

    ``answer`` counts from 0; at least two choices, none empty, none twice. Other keys are not read.

    Raises:
        DataError: the file cannot be read or has no questions, or a line is none; names file and line.
    """
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else f"not UTF-8 at byte {error.start}"
        raise DataError(f"{file} cannot be read: {why}; give a file of questions, a JSON object a line") from error
    if not text:
        raise DataError(f"{file} holds no questions; give a file with a JSON object a line")
    lines = enumerate(text.removesuffix("\n").split("\n"), 1)
    return [_question(line, f"{file}, line {number}") for number, line in lines]


def _question(line: str, place: str) -> Question:
    try:
        raw = parse_json(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: no JSON ({error}); needed is {_FORM}") from error
    found = raw if isinstance(raw, dict) else {}
    prompt, choices, answer = (found.get(name) for name in ("prompt", "choices", "answer"))
    if not isinstance(prompt, str) or not isinstance(choices, list):
        raise DataError(f"{place}: no question; needed is {_FORM}")
    texts = [one for one in choices if isinstance(one, str) and one]
    if len(texts) != len(choices) or len(set(texts)) != len(texts) or len(texts) < 2:
        raise DataError(f"{place}: choices {choices!r}; needed are at least two texts, none empty and none twice")
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(texts):
        raise DataError(f"{place}: answer {answer!r}; needed is the index of a choice, from 0 to {len(texts) - 1}")
    if any("\ud800" <= letter <= "\udfff" for text in (prompt, *texts) for letter in text):
        raise DataError(f"{place}: holds half a surrogate pair, which is no text")
    return Question(prompt, tuple(texts), answer, place)


_FORM = '{"prompt": TEXT, "choices": [TEXT, ...], "answer": INDEX}'


def tokens_of(
    words: Tokenizer, question: Question, max_positions: int, beginning: int | None = None
) -> tuple[list[list[int]], int]:
    """Tokens of the prompt with each choice, and how many of the first tokens are given, the same for all choices.

    At least one is given: before an empty prompt stands the end-of-document token, as where a document begins. Where
    documents begin with an id of their own, ``beginning``, it stands before every prompt instead.

    Raises:
        DataError: the model cannot see so many tokens.
    """
    prompt, *texts = words.encode([question.prompt, *(question.prompt + choice for choice in question.choices)])
    given = 0
    while given < len(prompt) and all(given < len(text) and text[given] == prompt[given] for text in texts):
        given += 1
    if given == 0 or beginning is not None:
        first = words.end_of_document if beginning is None else beginning
        texts, given = [[first, *text] for text in texts], given + 1
    longest = max(map(len, texts))
    if longest - 1 > max_positions:
        raise DataError(
            f"{question.place}: prompt and choice have {longest} tokens, the model sees {max_positions + 1}; shorten "
            "the prompt"
        )
    return texts, given


def log_probabilities(model: WholeModel, tokens: Sequence[Sequence[int]], given: int) -> list[float]:
    """Log-probability of the tokens of each text after those given, summed in float64; over the real vocabulary."""
    longest = max(map(len, tokens))
    padded = torch.tensor([[*text, *[0] * (longest - len(text))] for text in tokens])  # later tokens change no earlier
    logits = model(padded[:, :-1].to(next(model.parameters()).device))[given - 1 :, :, : model.vocab_size]
    shares = logits.double().log_softmax(-1).cpu()
    sums = []
    for row, text in enumerate(tokens):
        places = torch.arange(len(text) - given)
        sums.append(float(shares[places, row, padded[row, given : len(text)]].sum()))
    return sums


def _largest(sums: Sequence[float]) -> int | None:
    """Index of the largest, of equal ones the first; None: one is not a number."""
    if any(math.isnan(one) for one in sums):
        return None
    return max(range(len(sums)), key=sums.__getitem__)


def share_interval(count: int, total: int, coverage: float = COVERAGE) -> tuple[float, float]:
    """Exact two-sided interval of a share of which ``count`` of ``total`` were seen.

    Source: Clopper and Pearson 1934; its ends are the shares at which so few or so many have probability
    (1 - coverage) / 2.
    """
    tail = (1 - coverage) / 2
    low = 0.0 if count == 0 else 1 - _most_with(total - count, total, tail)
    high = 1.0 if count == total else _most_with(count, total, tail)
    return low, high


def _most_with(count: int, total: int, tail: float) -> float:
    """The share p at which a binomial variable is at most ``count`` with probability ``tail``, by bisection."""
    ways = [math.lgamma(total + 1) - math.lgamma(k + 1) - math.lgamma(total - k + 1) for k in range(count + 1)]
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        seen, missed = math.log(middle), math.log1p(-middle)
        below = math.fsum(math.exp(way + k * seen + (total - k) * missed) for k, way in enumerate(ways))
        low, high = (middle, high) if below > tail else (low, middle)
    return (low + high) / 2


def _percent(share: float, interval: tuple[float, float]) -> str:
    return f"{100 * share:.1f} % (95 % interval {100 * interval[0]:.1f} to {100 * interval[1]:.1f} %)"
