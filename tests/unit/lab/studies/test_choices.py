"""Questions are read or refused with file and line; intervals are exact; ties, lengths and NaN are as documented."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from megasdc.cli import app
from megasdc.common.errors import DataError
from megasdc.lab.studies.choices import Question, _largest, log_probabilities, read_questions, share_interval, tokens_of

GOOD = '{"prompt": "a is", "choices": [" b", " c"], "answer": 1, "id": 7}'


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "no JSON"),
        ("", "no JSON"),
        ("[1]", "no question"),
        ('{"prompt": 1, "choices": ["a", "b"], "answer": 0}', "no question"),
        ('{"prompt": "", "choices": ["a"], "answer": 0}', "at least two"),
        ('{"prompt": "", "choices": ["a", ""], "answer": 0}', "none empty"),
        ('{"prompt": "", "choices": ["a", "a"], "answer": 0}', "none twice"),
        (
            '{"prompt": "", "choices": ["a", "b"], "answer": 2}',
            "answer 2; needed is the index of a choice, from 0 to 1",
        ),
        ('{"prompt": "", "choices": ["a", "b"], "answer": true}', "answer True"),
        ('{"prompt": "", "choices": ["a", "b"]}', "answer None"),
        ('{"prompt": "\\ud800", "choices": ["a", "b"], "answer": 0}', "surrogate"),
    ],
)
def test_a_line_that_is_no_question_is_named(tmp_path: Path, line: str, said: str) -> None:
    """The error says file and line, what is there and what is needed; a file of good lines is read."""
    file = tmp_path / "questions.jsonl"
    file.write_text(f"{GOOD}\n{line}\n")
    with pytest.raises(DataError, match="line 2: ") as caught:
        read_questions(file)
    assert said in str(caught.value) and str(file) in str(caught.value)
    file.write_text(GOOD + "\n")
    assert read_questions(file) == [Question("a is", (" b", " c"), 1, f"{file}, line 1")]


@pytest.mark.parametrize(("content", "said"), [(b"", "holds no questions"), (b"\xff\n", "not UTF-8 at byte 0")])
def test_a_file_without_questions_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    """An empty file, and one that is no text."""
    (tmp_path / "q.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=said):
        read_questions(tmp_path / "q.jsonl")


@pytest.mark.parametrize(
    ("count", "total", "low", "high"),
    [
        (0, 10, 0.0, 0.3085),
        (5, 10, 0.1871, 0.8129),
        (10, 10, 0.6915, 1.0),
        (81, 263, 0.2527, 0.3676),
        (1, 2, 0.0126, 0.9874),
    ],
)
def test_intervals_are_clopper_and_pearsons(count: int, total: int, low: float, high: float) -> None:
    """Published values; at each end the probability of what was seen, and beyond, is 2.5 %."""
    found = share_interval(count, total)
    assert found == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))

    def at_least(share: float) -> float:
        return sum(math.comb(total, k) * share**k * (1 - share) ** (total - k) for k in range(count, total + 1))

    if count:
        assert at_least(found[0]) == pytest.approx(0.025)
    if count < total:
        seen = math.comb(total, count) * found[1] ** count * (1 - found[1]) ** (total - count)
        assert 1 - at_least(found[1]) + seen == pytest.approx(0.025)


def test_ties_and_what_is_not_a_number() -> None:
    """Of equal sums the first is taken; a question with NaN has no answer."""
    assert _largest([-2.0, -1.0, -1.0]) == 1
    assert _largest([-math.inf, -math.inf]) == 0
    assert _largest([-1.0, math.nan]) is None


class Letters:
    """A tokenizer of single letters, in which ``ab`` is one token."""

    end_of_document = 0

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids by code point; ``ab`` is 1."""
        return [[1 if one == "\1" else ord(one) for one in text.replace("ab", "\1")] for text in texts]


def test_what_is_given_is_common_to_the_prompt_and_all_choices() -> None:
    """A token that holds the border belongs to the choice; an empty prompt begins a document; too long is refused."""
    words: Any = Letters()
    x, a, b, c = map(ord, "xabc")
    assert tokens_of(words, Question("xa", ("b", "c"), 0, "q"), 9) == ([[x, 1], [x, a, c]], 1)
    assert tokens_of(words, Question("xx", ("b", "cc"), 0, "q"), 3) == ([[x, x, b], [x, x, c, c]], 2)
    assert tokens_of(words, Question("", ("b", "c"), 0, "q"), 9) == ([[0, b], [0, c]], 1)
    assert tokens_of(words, Question("", ("b", "c"), 0, "q"), 9, 7) == ([[7, b], [7, c]], 1)
    assert tokens_of(words, Question("xx", ("b", "cc"), 0, "q"), 9, 7) == ([[7, x, x, b], [7, x, x, c, c]], 3)
    with pytest.raises(DataError, match=r"f, line 3: prompt and choice have 4 tokens, the model sees 3"):
        tokens_of(words, Question("xx", ("b", "cc"), 0, "f, line 3"), 2)


class Fixed(torch.nn.Module):
    """A model whose logits depend on the last token alone: token t is followed by t + 1 with odds of 3 to 1 each."""

    vocab_size = 5

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [s, b, 8]: three entries of padding are large, and must not count."""
        logits = torch.full((*tokens.T.shape, 8), 50.0)
        logits[..., :5] = math.log(3) * torch.nn.functional.one_hot((tokens.T + 1) % 5, 5)
        return logits


def test_log_probabilities_are_those_of_the_choices_tokens() -> None:
    """Sums over what is not given, without padding of shorter texts or of the vocabulary."""
    model: Any = Fixed()
    right, wrong = math.log(3 / 7), math.log(1 / 7)
    found = log_probabilities(model, [[1, 2, 3], [1, 2, 4, 0, 1], [1, 2, 0]], 2)
    assert found == [pytest.approx(right), pytest.approx(wrong + 2 * right), pytest.approx(wrong)]


def test_options_of_a_split_do_not_go_with_questions(tmp_path: Path) -> None:
    """Both ways round the command line is refused with code 2 before anything is read."""
    (tmp_path / "q.jsonl").write_text(GOOD)
    choices = ["--choices", str(tmp_path / "q.jsonl")]
    for options in ([*choices, "--samples", "2"], [*choices, "--split", "valid"], ["--against", str(tmp_path)]):
        done = CliRunner().invoke(app, ["eval", str(tmp_path), *options])
        assert done.exit_code == 2, done.output
