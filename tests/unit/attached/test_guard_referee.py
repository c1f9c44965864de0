"""Does the referee of a guard name the wrong one of two replicas, whichever submodule it is, or say why not?"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from megasdc.common.addresses import FORWARD, Address
from megasdc.sdc.incident import Opinion
from megasdc.sdc.referee.referee import judge_exhibits
from megasdc.sdc.verdict import OWN_CODE, REFEREE
from tools.trainings.engines import PERSISTENT, SDPA, Planted, wrong_attention
from tools.trainings.pair import Judged, Side, build_model, draw_batch, judge_pair

LAYER, BERT = "model.layers.1", "bert.encoder.layer.0"


def _judged(model: str, precision: str, planted: Planted, **more: Any) -> Judged:
    models, batch = [build_model(model, precision, 3, **more) for _ in range(2)], draw_batch(precision, 5)
    sides = [Side(rank, one, batch) for rank, one in enumerate(models)]
    if planted.submodule == SDPA:
        sides[1] = Side(1, models[1], batch, partial(wrong_attention, planted))
    else:
        planted.plant(models[1])
    found = judge_pair((sides[0], sides[1]))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("model", "precision", "submodule", "phase", "basis"),
    [
        ("llama", "fp32", f"{LAYER}.input_layernorm", "forward", REFEREE),
        ("llama", "bf16", f"{LAYER}.input_layernorm", "weight_grad", OWN_CODE),  # whose bound is too wide
        ("llama", "autocast", f"{LAYER}.post_attention_layernorm", "backward", REFEREE),
        ("llama", "bf16", f"{LAYER}.mlp.act_fn", "forward", REFEREE),
        ("llama", "fp32", "model.embed_tokens", "weight_grad", REFEREE),
        ("llama", "fp32", f"{LAYER}.self_attn", "forward", OWN_CODE),
        ("llama", "fp32", "model.rotary_emb", "forward", OWN_CODE),
        ("llama", "fp32", SDPA, "forward", OWN_CODE),
        ("llama", "bf16", SDPA, "backward", OWN_CODE),
        ("gpt2", "fp32", "transformer.h.0.attn.c_attn", "weight_grad", REFEREE),
        ("gpt2", "autocast", "transformer.h.1.mlp.c_fc", "backward", REFEREE),
        ("gpt2", "bf16", "transformer.h.0.mlp.act", "backward", OWN_CODE),
        ("gpt2", "fp32", "transformer.wte", "weight_grad", REFEREE),
        ("gpt2", "fp16", "transformer.h.0.attn.resid_dropout", "forward", OWN_CODE),
        ("bert", "fp32", f"{BERT}.intermediate.intermediate_act_fn", "backward", REFEREE),
        ("bert", "bf16", f"{BERT}.attention.self", "backward", OWN_CODE),
        ("bert", "fp32", "bert.embeddings.word_embeddings", "weight_grad", REFEREE),
    ],
)
def test_a_wrong_submodule_is_named(model: str, precision: str, submodule: str, phase: str, basis: str) -> None:
    """Norms, activations, embeddings and layers of transformers by bounds; attention and others by their own code."""
    found = _judged(model, precision, Planted(1, submodule, phase, PERSISTENT, 4, "row"))
    assert found.named == [1], found.opinion.reason
    assert found.opinion.within == {0: True, 1: False} and found.opinion.basis == basis
    assert found.opinion.alone == (0, 1), "from what both had, without another rank"
    assert [one.basis for one in found.rulings] == [basis]


@pytest.mark.slow
@pytest.mark.parametrize("hooked", [(0, 1), (0,), (1,)])
def test_eager_attention_and_hooks_of_the_training_are_judged(hooked: tuple[int, ...]) -> None:
    """Softmax attention of several operations; a layer with a hook, also on one rank alone, by its class's code."""
    wrong_row = Planted(1, f"{LAYER}.self_attn", "backward", PERSISTENT, 4, "row")
    found = _judged("llama", "fp32", wrong_row, attention="eager")
    assert (found.named, found.opinion.basis) == ([1], OWN_CODE)
    models, batch = [build_model("llama", "fp32", 3) for _ in range(2)], draw_batch("fp32", 5)
    for one in hooked:
        models[one].get_submodule(f"{LAYER}.mlp.up_proj").register_forward_hook(lambda *_: None)
    sides = Side(0, models[0], batch), Side(1, models[1], batch)
    Planted(0, f"{LAYER}.mlp.up_proj", "forward", PERSISTENT).plant(models[0])
    judged = judge_pair(sides)
    assert judged is not None and (judged.named, judged.opinion.basis) == ([0], OWN_CODE)


def test_a_hook_that_changes_what_is_computed_lets_nobody_be_named() -> None:
    """What all ranks have is another function than the class's: elements that agree are not what its code computes."""
    models, batch = [build_model("llama", "fp32", 3) for _ in range(2)], draw_batch("fp32", 5)
    for one in models:
        one.get_submodule(f"{LAYER}.mlp.up_proj").register_forward_hook(lambda _, __, output: 2 * output)
    sides = Side(0, models[0], batch), Side(1, models[1], batch)
    Planted(0, f"{LAYER}.mlp.up_proj", "forward", PERSISTENT, 7, "element").plant(models[0])
    judged = judge_pair(sides)
    assert judged is not None and judged.named == []
    assert "elements that agree are not what the referee takes them for" in judged.opinion.reason
    assert judged.opinion.alone == (), "nobody knows what it is made of"


def test_what_is_not_repeated_and_what_is_not_computed_are_two_reasons() -> None:
    """Each of the ranks that it is true of."""
    address = Address(1, 0, FORWARD, "m", "output")
    texts = "it did not repeat", "it is no result that the referee computes"

    def opinion(shown: tuple[str, str]) -> Opinion:
        asked = judge_exhibits(address, [0, 1], iter(shown[:1]))
        sent: list[Any] = [next(asked), shown[1]]
        try:
            while True:
                asked.send(sent)
                sent = [None, None]
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]

    assert opinion(texts).reason == f"rank 0: {texts[0]}, rank 1: {texts[1]}"
    assert opinion((texts[1], texts[1])).reason == f"ranks [0, 1]: {texts[1]}"
