"""Do conversion, export and import end cleanly when they are disturbed, and keep what they promise?"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from whole_runs import MODELS, events_of, metrics_of, prepare_text, train_run, write_config

from megasdc.checkpoint import weights as weights_module
from megasdc.checkpoint.verify import verify_checkpoint
from megasdc.checkpoint.weights import CheckpointWeights
from megasdc.cli import main
from megasdc.common.errors import CheckpointError, ConfigError
from megasdc.interchange import convert, export_hf, import_hf
from megasdc.train.signals import exiting_on_signals

pytestmark = pytest.mark.distributed

CHANGES: dict[str, Any] = {
    "model": {**MODELS["llama"], "num_query_groups": 1},
    "deepspeed__bf16": {"enabled": True},
    "training": {"steps": 2, "eval_interval": 2, "eval_samples": 4},
    "checkpoint__interval": 1,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared text."""
    return prepare_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """The folder of a run of two steps in bf16, on one rank."""
    folder = tmp_path_factory.mktemp("run")
    config = write_config(folder / "c.json", data, folder / "run", **CHANGES)
    assert train_run(config, 1) == [(0, None)]
    return folder / "run"


@pytest.fixture
def checkpoint(tmp_path: Path, run: Path) -> Path:
    """A copy of its last checkpoint, which a test may harm."""
    return Path(shutil.copytree(run / "checkpoints" / "step_00000002", tmp_path / "copy" / "step_00000002"))


def _command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> Any:
    """Run the command line here; its exit code."""
    monkeypatch.setattr("sys.argv", ["megasdc", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def _before(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, act: Callable[..., Any]) -> None:
    """Do something just before a function, which then works as always."""
    function = getattr(place, name)

    def wrapped(*args: Any, **options: Any) -> Any:
        act(*args, **options)
        return function(*args, **options)

    monkeypatch.setattr(place, name, wrapped)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_a_conversion_that_is_ended_leaves_nobody_behind(tmp_path: Path, checkpoint: Path, number: int) -> None:
    """DeepSpeed's process ends with the command, even a killed one; else the folder goes too, and the code says why."""
    command = ["convert-checkpoint", str(checkpoint), "--to", "universal", "--out", str(tmp_path / "out")]
    process = subprocess.Popen([sys.executable, "-m", "megasdc", *command], stderr=subprocess.DEVNULL)
    children: list[psutil.Process] = []
    while not children:
        assert process.poll() is None, "it ended before it could be disturbed"
        children = [
            child
            for child in psutil.Process(process.pid).children(recursive=True)
            if any(argument.endswith("conversion_child.py") for argument in child.cmdline())
        ]
        time.sleep(0.01)
    if number != signal.SIGKILL:
        children[0].suspend()  # it does not end by itself
    process.send_signal(number)
    assert process.wait(60) == (-number if number == signal.SIGKILL else 128 + number)
    assert psutil.wait_procs(children, timeout=60)[1] == []
    assert not (tmp_path / "out").exists()
    assert (tmp_path / ".converting_out").exists() == (number == signal.SIGKILL)
    assert not (tmp_path / ".converting_out" / "latest_universal").exists(), "DeepSpeed has finished its work"


def test_a_conversion_that_is_ended_while_its_process_starts_leaves_nobody(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal that comes once there is a process, and before the command knows it, ends that process too, whichever
    thread of the command gets it.
    """
    done = threading.Event()
    threading.Thread(target=done.wait, daemon=True).start()
    started: list[psutil.Process] = []

    class Started(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(psutil.Process(self.pid))
            started[-1].suspend()  # it does not end by itself
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)  # till another thread has got it, if the command's own does not

    with monkeypatch.context() as patch:
        patch.setattr(convert.subprocess, "Popen", Started)
        assert _command(patch, "convert-checkpoint", checkpoint, "--to", "universal", "--out", tmp_path / "out") == 143
    done.set()
    assert len(started) == 1 and psutil.wait_procs(started, timeout=60)[1] == []
    assert not (tmp_path / "out").exists() and not (tmp_path / ".converting_out").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_an_export_or_import_that_is_ended_leaves_nothing(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """With tensors written and the end not reached, the temporary folder goes and the exit code is 128 + signal."""
    out, weights = tmp_path / "out", tmp_path / "weights"
    handler = signal.getsignal(number)

    def send(*args: Any) -> None:
        assert any(tmp_path.glob(".tmp_*/*.safetensors"))
        os.kill(os.getpid(), number)

    with monkeypatch.context() as patch:
        _before(patch, export_hf, "export_tokenizer", send)
        assert _command(patch, "export-hf", run / "checkpoints", out) == 128 + number
    assert list(tmp_path.iterdir()) == []
    export_hf.export_hf(run / "checkpoints", out)
    with monkeypatch.context() as patch:
        _before(patch, import_hf, "_copy_tokenizer", send)
        assert _command(patch, "import-hf", out, weights) == 128 + number
    assert list(tmp_path.iterdir()) == [out]
    assert signal.getsignal(number) == handler


def test_a_checkpoint_that_is_deleted_meanwhile_is_named(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Retention takes the source away during conversion, export or verification: exit code 72, reason and remedy."""

    def disturb(place: Any, name: str, act: Callable[..., Any], *command: object) -> None:
        kept = shutil.copytree(checkpoint, tmp_path / "kept", dirs_exist_ok=True)
        with monkeypatch.context() as patch:
            _before(patch, place, name, act)
            assert _command(patch, *command) == 72
        assert f"{checkpoint} was deleted or replaced while it was read" in capsys.readouterr().err
        shutil.copytree(kept, checkpoint)

    def delete(*args: Any, **options: Any) -> None:
        shutil.rmtree(checkpoint)

    def delete_when_read(weights: Any, index: int, device: str = "cpu") -> None:
        if device == "cpu" and index == 2:
            delete()

    converting = ("convert-checkpoint", checkpoint, "--to", "universal", "--out", tmp_path / "out")
    exporting = ("export-hf", checkpoint, tmp_path / "out")
    disturb(convert, "_run_deepspeed", delete, *converting)
    disturb(convert, "read_source", delete, *converting)
    disturb(weights_module, "verify_checkpoint", delete, *exporting)
    disturb(CheckpointWeights, "layer", delete_when_read, *exporting)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "kept"]


def test_paths_may_have_brackets(tmp_path: Path, data: Path, checkpoint: Path) -> None:
    """A folder that a pattern would not find is converted; a run starts from the result, and resumes, in such ones."""
    folder = tmp_path / "lr[1e-3] *"
    checkpoint.parent.rename(folder)
    report = convert.convert_to_universal(folder / checkpoint.name, workers=1)
    assert verify_checkpoint(report.path).ok
    changes = {**CHANGES, "training": {"steps": 4}, "checkpoint__universal": report.path}
    config = write_config(tmp_path / "c.json", data, folder / "next", **changes)
    assert train_run(config, 1, "megasdc.training.stop_step=3") == [(0, None)]
    assert [event["step"] for event in events_of(folder / "next", "resume", "universal")] == [2]
    assert train_run(config, 1) == [(0, None)]
    assert [event["step"] for event in events_of(folder / "next", "resume", "checkpoint")] == [3]


def test_json_of_a_conversion_is_all_of_its_output(tmp_path: Path, checkpoint: Path) -> None:
    """In a fresh process, where DeepSpeed is imported on the way, standard output is one JSON object."""
    command = ["convert-checkpoint", str(checkpoint), "--to", "universal", "--out", str(tmp_path / "out"), "--json"]
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}  # it warns without
    done = subprocess.run(
        [sys.executable, "-m", "megasdc", *command], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["path"] == str(tmp_path / "out")


def test_a_closed_terminal_ends_a_command_but_not_under_nohup() -> None:
    """SIGHUP ends with 128 + signal, so that what was begun is removed; one that is ignored stays ignored.

    SIGUSR1 does so where a command names it, and comes a second time for nothing.
    """

    def handler(number: int, frame: Any) -> None:
        """In place of the default, which would end the tests."""

    before = signal.signal(signal.SIGHUP, handler)
    try:
        with pytest.raises(SystemExit) as ended, exiting_on_signals():
            os.kill(os.getpid(), signal.SIGHUP)
        assert ended.value.code == 128 + signal.SIGHUP
        assert signal.getsignal(signal.SIGHUP) == handler
        with pytest.raises(SystemExit) as ended, exiting_on_signals(signal.SIGUSR1):
            try:
                os.kill(os.getpid(), signal.SIGUSR1)
            finally:
                os.kill(os.getpid(), signal.SIGUSR1)
        assert ended.value.code == 128 + signal.SIGUSR1
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with exiting_on_signals():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_outputs_in_and_over_their_source(tmp_path: Path, checkpoint: Path) -> None:
    """Neither form is written into the checkpoint that it is made from or over a file; an empty folder is taken."""
    with pytest.raises(CheckpointError, match="lies in the checkpoint "):
        convert.convert_to_universal(checkpoint, checkpoint / "universal")
    with pytest.raises(ConfigError, match=r"OUT: .* lies in"):
        export_hf.export_hf(checkpoint, checkpoint / "exported")
    other = shutil.copytree(checkpoint, tmp_path / "other" / "step_00000009")
    with pytest.raises(CheckpointError, match="lies in the checkpoint "):
        convert.convert_to_universal(checkpoint, other / "universal")
    shutil.rmtree(other.parent)
    assert verify_checkpoint(checkpoint).ok
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match=r"file is a file; choose another --out$"):
        convert.convert_to_universal(checkpoint, tmp_path / "file")
    (tmp_path / "file").unlink()
    (tmp_path / "out").mkdir()
    assert convert.convert_to_universal(checkpoint, tmp_path / "out", workers=1).step == 2
    (tmp_path / "link").symlink_to(tmp_path / "out")
    convert.convert_to_universal(checkpoint, tmp_path / "link", force=True, workers=1)
    assert not (tmp_path / "link").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "link", "out"]


def test_a_run_in_bf16_is_exported_and_evaluated(tmp_path: Path, run: Path, data: Path) -> None:
    """The tensors are the saved bf16 weights bit for bit, and the loss is the run's own and that of transformers."""
    import transformers
    from safetensors.torch import load_file

    from megasdc.config.data import DataSection
    from megasdc.data.dataset import build_split
    from megasdc.data.loader import EvalLoader
    from megasdc.train.inference import evaluate_weights

    result = export_hf.export_hf(run / "checkpoints", tmp_path / "out")
    assert result.dtype == "bfloat16"
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    file = run / "checkpoints" / "step_00000002" / "layer_00-model_00-model_states.pt"
    saved = torch.load(file, weights_only=False)["word_embeddings.weight"]
    assert torch.equal(tensors["model.embed_tokens.weight"], saved[:500])
    (reported,) = [row["eval/loss"] for row in metrics_of(run) if "eval/loss" in row]
    assert evaluate_weights(run / "checkpoints").loss == pytest.approx(reported, rel=1e-3)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").eval()
    assert model.dtype == torch.bfloat16
    section = DataSection.model_validate({"path": str(data), "sequence_length": 32})
    losses = []
    for tokens, (labels, _) in EvalLoader(build_split(section, 500, "valid", 4), 1, 0, 1, 4):
        with torch.no_grad():
            losses.append(torch.nn.functional.cross_entropy(model(tokens).logits[0].double(), labels[0]))
    assert float(torch.stack(losses).mean()) == pytest.approx(reported, rel=1e-2)


def _byte_level_tokenizer(folder: Path) -> Path:
    """A tokenizer of transformers as GPT-2's, trained on a module."""
    import argparse

    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    model.train([argparse.__file__], trainer)
    fast: Any = transformers.PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<|endoftext|>")
    fast.save_pretrained(str(folder))
    return folder


def test_a_tokenizer_of_transformers_is_exported_as_it_is(tmp_path: Path, data: Path) -> None:
    """Prepared, trained and exported with one, AutoTokenizer of the export gives the ids of the original."""
    import transformers

    from megasdc.config.data import DataSection
    from megasdc.data.prepare import prepare
    from megasdc.train.inference import generate

    original = _byte_level_tokenizer(tmp_path / "tokenizer")
    section = DataSection.model_validate(
        {
            "path": str(tmp_path / "data"),
            "split": [8, 1, 1],
            "sources": [{"kind": "files", "path": str(data.parent / "texts")}],
            "tokenizer": {"kind": "huggingface", "path": str(original)},
        }
    )
    prepare(section, tmp_path / "data", workers=1, progress=False)
    changes = {"training": {"steps": 1, "eval_interval": 0}, "model": {**MODELS["gpt"], "num_layers": 1}}
    config = write_config(tmp_path / "c.json", tmp_path / "data", tmp_path / "run", **changes)
    assert train_run(config, 1) == [(0, None)]
    result = export_hf.export_hf(tmp_path / "run" / "checkpoints", tmp_path / "out")
    assert (result.tokenizer, result.note) == ("auto", None)
    before, after = (transformers.AutoTokenizer.from_pretrained(path) for path in (original, tmp_path / "out"))
    text = (data.parent / "texts" / "heapq.txt").read_text(encoding="utf-8") + " <|endoftext|>  caf\u00e9\n"
    assert after(text)["input_ids"] == before(text)["input_ids"]
    assert after.eos_token_id == before.eos_token_id == 0
    imported = import_hf.import_hf(tmp_path / "out", tmp_path / "weights")
    assert imported.tokenizer_vocab_size == len(before)
    prompt = "def f(x):\n    return"
    assert generate(tmp_path / "weights", prompt, max_tokens=1).prompt_tokens == before(prompt)["input_ids"]


_LAYERS, _HIDDEN, _FFN = 24, 512, 1408
_MEASURE = """
import sys
from pathlib import Path
from megasdc.interchange.export_hf import export_hf
from megasdc.interchange.import_hf import import_hf
import deepspeed, transformers, megasdc.model.pipeline
import megatron.core.models.gpt.gpt_layer_specs, transformers.models.llama.modeling_llama

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) * 1024

def peak(work):
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    work()
    return status("VmHWM") - before

model, weights, out, tokenizer, small = sys.argv[1:]
import_hf(small, small + "_weights")  # whatever is imported, compiled and kept at first is none of a model's
export_hf(small + "_weights", small + "_out", tokenizer=tokenizer)
print(peak(lambda: import_hf(model, weights)), peak(lambda: export_hf(weights, out, tokenizer=tokenizer)))
"""


def test_export_and_import_hold_a_layer_and_not_the_model(tmp_path: Path, data: Path) -> None:
    """Above what the interpreter needs, a model of 310 MB takes less than a quarter of that at its peak."""
    from megasdc.checkpoint.tensor_files import num_bytes, write_tensors
    from megasdc.config.model import ModelSection
    from megasdc.model.hf.classes import hf_config
    from megasdc.model.hf.tensors import hf_shapes

    totals = {}
    for name, layers, hidden, ffn in (("model", _LAYERS, _HIDDEN, _FFN), ("small", 2, 64, 64)):
        sizes = {"num_layers": layers, "hidden_size": hidden, "ffn_hidden_size": ffn, "num_attention_heads": 8}
        model = ModelSection.model_validate({**MODELS["llama"], **sizes})
        plan = {key: torch.empty(shape, device="meta") for key, shape in hf_shapes(model, 500).items()}
        totals[name] = sum(map(num_bytes, plan.values()))
        (folder := tmp_path / name).mkdir()
        (folder / "config.json").write_text(json.dumps(hf_config(model, 500, 1, "float32")))
        tensors = ((key, torch.ones(like.shape)) for key, like in plan.items())
        write_tensors(folder / "model.safetensors", plan, tensors)
    total = totals["model"]
    assert total > 300e6
    folders = [str(tmp_path / name) for name in ("model", "weights", "out")]
    command = [sys.executable, "-c", _MEASURE, *folders, str(data / "tokenizer"), str(tmp_path / "small")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    importing, exporting = map(int, done.stdout.split()[-2:])
    assert importing < total / 4
    assert exporting < total / 4
    shutil.rmtree(tmp_path)
