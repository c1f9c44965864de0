"""Small models and tokenizers of Hugging Face in folders, which tests import and change."""

import json

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

LLAMA = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GPT2 = {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "tie_word_embeddings": True}
TENSORS = "model.safetensors"


def made(folder, kind="llama", **fields):
    """A folder with a small random model, whose norms and biases matter too."""
    torch.manual_seed(1)
    names = {"llama": ("LlamaConfig", "LlamaForCausalLM"), "gpt2": ("GPT2Config", "GPT2LMHeadModel")}
    config, model = (getattr(transformers, name) for name in names[kind])
    built = model(config(**{**(LLAMA if kind == "llama" else GPT2), **fields}))
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            centre = 1.0 if parameter.dim() == 1 and "weight" in name else 0.0
            parameter.copy_(centre + 0.2 * torch.randn_like(parameter))
    built.save_pretrained(folder)
    return folder


def edit(folder, **changes):
    """Change keys of config.json."""
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, **changes}))


def change(folder, **tensors):
    """Replace or add tensors."""
    save_file({**load_file(folder / TENSORS), **tensors}, folder / TENSORS, {"format": "pt"})


TEXTS = [f"document {index}: the quick brown fox, {index * 7} times\n" for index in range(12)]


def tokenizer(folder, template=True, **config):
    """A byte-level tokenizer; with a template it puts <s> before a text, as Llama's does."""
    model = Tokenizer(models.BPE())
    model.pre_tokenizer, model.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<unk>", "<s>", "</s>"]
    model.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    if template:
        model.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    folder.mkdir(parents=True, exist_ok=True)
    # written by hand, in an order and with a spelling that no library writes
    (folder / "tokenizer.json").write_text(model.to_str(pretty=False) + "\n\n")
    content = {
        "eos_token": "</s>",
        "bos_token": "<s>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "odd": 1,
        **config,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(content, indent=7))
    return folder
