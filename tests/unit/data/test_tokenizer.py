"""Tokenizers: what goes in comes out, the same text gives the same model, and an unusable one is refused."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
import sentencepiece
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from megasdc.common.errors import DataError
from megasdc.data.sources import iterate_documents
from megasdc.data.tokenizer import (
    TOKENIZER_CONFIG,
    RoundTrip,
    checksum_tokenizer,
    load_tokenizer,
    measure_round_trip,
    train_sentencepiece,
)

TRICKY = [
    "",
    " ",
    "  leading and trailing  ",
    "a\n\n\n\tb\r\n c\x0b\x00d",
    "ﬁ ligature, Å, e\u0301, full\u3000width",
    "日本語 🎉 \U0001f468\u200d\U0001f469\u200d\U0001f467",
    "<eod> </s> <unk> <0x41> <|endoftext|>",
]


@pytest.fixture(scope="module")
def texts(corpus, section_for):
    return list(iterate_documents(section_for("unused", corpus).sources[0]))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_round_trip(tmp_path, texts, model_type):
    """decode(encode(text)) is the text, bit by bit, also for bytes and scripts that training never saw."""
    train_sentencepiece(texts, tmp_path / "m.model", 800, model_type)
    tokenizer = load_tokenizer("sentencepiece", tmp_path / "m.model")
    assert tokenizer.vocab_size == 800
    for text in TRICKY + texts[:5]:
        (ids,) = tokenizer.encode([text])
        assert tokenizer.decode(ids) == text
        assert tokenizer.end_of_document not in ids
    assert tokenizer.decode([tokenizer.end_of_document]) == ""
    arrays = tokenizer.encode_arrays(TRICKY)
    assert [array.tolist() for array in arrays] == tokenizer.encode(TRICKY)
    assert {array.dtype for array in arrays} == {np.dtype(np.int32)}


def sentencepiece_model(path, rule):
    """A model of another origin than megasdc: it normalises, and what it does not know is one unknown id."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["abcd efgh, ABCD\tEFGH" * 3] * 50),
        model_writer=model,
        vocab_size=28,
        model_type="char",
        normalization_rule_name=rule,
        minloglevel=2,
        hard_vocab_limit=False,
    )
    path.write_bytes(model.getvalue())
    return load_tokenizer("sentencepiece", path)


def wordlevel_folder(folder):
    """A Hugging Face tokenizer that knows two words in lower case."""
    model = Tokenizer(models.WordLevel({"known": 0, "words": 1, "<unk>": 2, "</s>": 3}, unk_token="<unk>"))
    model.normalizer = normalizers.Lowercase()
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=model, eos_token="</s>", unk_token="<unk>")
    fast.save_pretrained(folder)
    return folder


def test_characters_that_a_tokenizer_changes_or_does_not_know(tmp_path, texts):
    """Lost newlines, folded case and unknown text are counted by character; a model made here keeps all."""
    normal = sentencepiece_model(tmp_path / "n", "nmt_nfkc")
    assert measure_round_trip(normal, ["abcd\nefgh\n"]) == RoundTrip(10, 2, 0)  # one newline becomes a space
    assert measure_round_trip(normal, ["abcd สวัสดี ab"]) == RoundTrip(14, 6, 6)
    assert measure_round_trip(normal, ["\u334d" * 9, "ab"]) == RoundTrip(11, 9, 9)  # each becomes four characters
    folded = sentencepiece_model(tmp_path / "f", "nmt_nfkc_cf")
    assert measure_round_trip(folded, ["ABCD efgh"]) == RoundTrip(9, 4, 0)
    words = load_tokenizer("huggingface", wordlevel_folder(tmp_path / "w"))
    assert measure_round_trip(words, ["Known words", "other"]) == RoundTrip(16, 1 + 5, 5)
    train_sentencepiece(texts, tmp_path / "m.model", 600)
    assert measure_round_trip(load_tokenizer("sentencepiece", tmp_path / "m.model"), TRICKY[:6]).changed == 0


def test_training_is_deterministic(tmp_path, texts):
    """The same texts give the same model file, other texts another."""
    for name, sample in (("a", texts), ("b", texts), ("c", texts[1:])):
        train_sentencepiece(sample, tmp_path / name, 600)
    first, again, other = (checksum_tokenizer("sentencepiece", tmp_path / name) for name in "abc")
    assert first == again != other
    assert load_tokenizer("sentencepiece", tmp_path / "a").checksum == first


@pytest.mark.parametrize("vocab_size", [100, 10**6])
def test_impossible_vocabulary(tmp_path, vocab_size):
    """A vocabulary that is too small or too large for the text is a DataError that names it; nothing is written."""
    with pytest.raises(DataError, match=f"with {vocab_size} pieces can be trained"):
        train_sentencepiece(["some text\n" * 50], tmp_path / "m", vocab_size)
    assert not list(tmp_path.iterdir())


def test_huggingface_round_trip(tmp_path, huggingface_folder):
    """A tokenizer from a folder gives text back, makes no special token from text, and survives save and load."""
    tokenizer = load_tokenizer("huggingface", huggingface_folder)
    tokenizer.save(tmp_path)
    again = load_tokenizer("huggingface", tmp_path)
    assert tokenizer.vocab_size == 500
    for text in TRICKY:
        (ids,) = tokenizer.encode([text])
        assert tokenizer.decode(ids) == text
        assert tokenizer.end_of_document not in ids
        assert again.encode([text]) == [ids]


def model_folder(folder, model_type):
    """A model's tokenizer, of a class that would split its digits in another way, and its configuration."""
    folder.mkdir(parents=True)
    model = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    digits, spaces = pre_tokenizers.Digits(True), pre_tokenizers.Metaspace(prepend_scheme="never")
    model.pre_tokenizer = pre_tokenizers.Sequence([digits, spaces])
    model.decoder = decoders.Metaspace(prepend_scheme="never")
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    model.train_from_iterator([f"hello this is text number {i} of 1999" for i in range(200)], trainer)
    model.save(str(folder / "tokenizer.json"))
    tokens = {"tokenizer_class": "LlamaTokenizer", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / TOKENIZER_CONFIG).write_text(json.dumps(tokens))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


@pytest.mark.parametrize("known", ["by its type", "by its name", "not"])
def test_copy_gives_the_ids_of_the_model(tmp_path, monkeypatch, known):
    """Also where transformers takes the class from config.json or the name on the hub, which a copy has not."""
    cache = tmp_path / "cache" / "models--deepseek-ai--deepseek-coder-x"
    source = model_folder(cache / "snapshots" / "abc", "phi3" if known == "by its type" else "llama")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    tokenizer = load_tokenizer("huggingface", "deepseek-ai/deepseek-coder-x" if known == "by its name" else source)
    tokenizer.save(tmp_path / "copy")
    copy = load_tokenizer("huggingface", tmp_path / "copy")
    texts = ["text", "hello 2024", " this\n is 1999"]
    assert copy.encode(texts) == tokenizer.encode(texts)
    whole = Tokenizer.from_file(str(source / "tokenizer.json"))
    assert (copy.encode(texts) == [whole.encode(text).ids for text in texts]) == (known != "not")
    files = {path.name: path.read_bytes() for path in (tmp_path / "copy").iterdir()}
    written = {name for name, content in files.items() if content == (source / name).read_bytes()}
    assert written == ({"tokenizer.json", TOKENIZER_CONFIG} if known == "not" else {"tokenizer.json"})


def test_copy_with_other_ids_is_refused(tmp_path, huggingface_folder, monkeypatch):
    """Where no class makes the copy what the source is."""
    real = transformers.AutoTokenizer.from_pretrained
    other = wordlevel_folder(tmp_path / "other")
    chosen = {str(huggingface_folder): str(huggingface_folder)}
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda path, **_: real(chosen.get(path, other)))
    with pytest.raises(DataError, match=r"gives other ids without the config\.json.*save_pretrained\(DIR\)"):
        load_tokenizer("huggingface", huggingface_folder).save(tmp_path / "copy")


def test_huggingface_without_end_token(tmp_path, huggingface_folder):
    """A tokenizer that cannot mark the end of a document is refused."""
    tokenizer = load_tokenizer("huggingface", huggingface_folder)
    tokenizer.save(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    content = json.loads(path.read_text())
    content.pop("eos_token")
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match="has no end-of-sentence token"):
        load_tokenizer("huggingface", tmp_path)


def test_unusable_tokenizers(tmp_path, monkeypatch):
    """A missing or damaged model is a DataError that names the file."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "bad.model").write_bytes(b"not a model")
    with pytest.raises(DataError, match=r"bad\.model is not a SentencePiece model"):
        load_tokenizer("sentencepiece", tmp_path / "bad.model")
    with pytest.raises(DataError, match=r"none\.model is missing"):
        load_tokenizer("sentencepiece", tmp_path / "none.model")
    with pytest.raises(DataError, match="no tokenizer can be loaded"):
        load_tokenizer("huggingface", tmp_path)


def test_backend_gives_the_ids_of_transformers(tmp_path, texts, huggingface_folder):
    """What workers load gives the ids that transformers gives, for odd text and special tokens too, after a reload."""
    tokenizer = load_tokenizer("huggingface", huggingface_folder)
    kind, path = tokenizer.worker_files(huggingface_folder, tmp_path)
    assert kind == "backend"
    for backend in (load_tokenizer(kind, path), tokenizer):
        for text in TRICKY + texts[:5]:
            expected = tokenizer._model([text], add_special_tokens=False, split_special_tokens=True)["input_ids"]
            assert backend.encode([text]) == expected
            assert backend.decode(expected[0]) == text
        assert (backend.vocab_size, backend.end_of_document) == (500, tokenizer.end_of_document)


def test_backend_is_not_used_where_python_has_a_part(tmp_path, huggingface_folder, monkeypatch):
    """A class that encodes in its own way is asked itself, in workers too."""
    import transformers

    class Own(transformers.PreTrainedTokenizerFast):
        def _encode_plus(self, *args, **options):
            return {"input_ids": [[1, 2, 3]]}

    own = Own.from_pretrained(str(huggingface_folder))
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda path, **options: own)
    tokenizer = load_tokenizer("huggingface", huggingface_folder)
    assert tokenizer.encode(["a"]) == [[1, 2, 3]]
    assert tokenizer.worker_files(huggingface_folder, tmp_path) == ("huggingface", huggingface_folder)


def test_long_texts_are_trained_on_whole(tmp_path, texts):
    """A text beyond the length that SentencePiece takes counts to its last character, as its pieces would."""
    long = "".join(texts)[:11_000] + "日本語🎉" * 1500  # 20,000 bytes after the first 11,000 characters
    pieces = [long[start : start + 4000] for start in range(0, len(long), 4000)]
    for name, documents in (("long", [long]), ("pieces", pieces), ("start", pieces[:1])):
        train_sentencepiece(documents, tmp_path / name, 500, "bpe")
    assert (tmp_path / "long").read_bytes() == (tmp_path / "pieces").read_bytes()
    assert (tmp_path / "long").read_bytes() != (tmp_path / "start").read_bytes()
    tokenizer = load_tokenizer("sentencepiece", tmp_path / "long")
    assert len(tokenizer.encode(["日本語🎉" * 100])[0]) < 300  # merges of what stands behind the first pieces
