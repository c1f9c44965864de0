"""Are wrong products found, counted and described?"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megasdc.config.faults import FaultSpec
from megasdc.faults.injector import Injector
from megasdc.ops.stress import products
from megasdc.ops.stress.drill import ALONE
from megasdc.ops.stress.products import DTYPES, PASSES, SLOTS, Linear, Products
from megasdc.tensors.checksum import checksum

SMALL = [Linear("h64.mlp.linear_fc1", 8, 64, 256), Linear("odd.7x13x5", 7, 13, 5)]
RESULTS = PASSES * len(SMALL) * len(DTYPES) * len(SLOTS)


@pytest.fixture(autouse=True)
def small_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two small layers in the place of all."""
    monkeypatch.setattr(products, "linears", lambda on_accelerator: SMALL)


def harmed(**fault: object) -> Products:
    injector = Injector([FaultSpec.model_validate(fault)], ALONE, 64)
    return Products(torch.device("cpu"), lambda hidden: injector)


def test_a_healthy_device_has_no_finding() -> None:
    """All products are compared in every round, with fp64 in the first only, and none is wrong."""
    device = Products(torch.device("cpu"))
    first, second = device.run_round(1), device.run_round(2)
    assert (first["compared"], first["wrong"], first["checked"]) == (RESULTS, 0, RESULTS // PASSES)
    assert (second["compared"], second["wrong"], second["checked"]) == (RESULTS, 0, 0)
    assert first["values"] == second["values"]


def test_checksums_are_those_of_the_products() -> None:
    """Against NumPy: with small whole numbers as inputs, a product's checksum is that of the exact result."""
    device = Products(torch.device("cpu"))
    said = device.run_round(1)["values"]
    inputs = products.make_inputs(SMALL[1])
    exact = (inputs["x"].double().numpy() @ inputs["w"].double().numpy().T).astype(np.float32)
    result = torch.nn.functional.linear(inputs["x"], inputs["w"])
    assert said["odd.7x13x5 7x13x5 fp32 forward"] == checksum(result)
    assert np.allclose(result.numpy(), exact, rtol=1e-5, atol=1e-5)


def test_a_fault_that_comes_and_goes_is_described() -> None:
    """One flip in the second pass of round 2: once wrong, in that case, with its element count and bit."""
    step = PASSES + 2
    fault = {"submodule": "h64.mlp.linear_fc1", "phase": "backward", "bits": [20], "steps": [step, step], "once": True}
    device = harmed(**fault)
    assert device.run_round(1)["wrong"] == 0
    said = device.run_round(2)
    (finding,) = said["findings"]
    assert said["wrong"] == 1 and finding["against"] == "first" and finding["step"] == step
    assert finding["what"] == "h64.mlp.linear_fc1 8x64x256 fp32 backward"
    assert (finding["elements"], finding["of"], finding["bits"]) == (1, 8 * 64, {"20": 1})
    assert device.run_round(3)["wrong"] == 0


def test_one_wrong_first_pass_does_not_make_the_others_wrong() -> None:
    """What most passes give is expected, so that a single early fault is one wrong result, however long the test."""
    fault = {"submodule": "odd.*", "bits": [9], "pattern": "indices", "indices": [4], "steps": [1, 1]}
    device = harmed(**fault)
    said = device.run_round(1)
    assert said["wrong"] == len(DTYPES) and said["values"] == Products(torch.device("cpu")).run_round(1)["values"]
    assert all((one["elements"], one["first"], one["bits"]) == (1, 4, {"9": 1}) for one in said["findings"])
    assert device.run_round(2)["wrong"] == 0


def test_a_fault_that_is_always_there_is_found_by_the_reference() -> None:
    """The same wrong bit each time repeats; only fp64 tells it, and what is small enough for rounding goes unseen."""
    always = {"submodule": "odd.*", "phase": "forward", "pattern": "indices", "indices": [3]}
    device = harmed(**always, kind="value", value=1000.0)
    said = device.run_round(1)
    assert said["wrong"] == len(DTYPES)
    assert [(finding["against"], finding["elements"], finding["first"]) for finding in said["findings"]] == [
        ("reference", 1, 3)
    ] * len(DTYPES)
    assert device.run_round(2)["wrong"] == 0
    device = harmed(**always, bits=[0])
    assert device.run_round(1)["wrong"] == device.run_round(2)["wrong"] == 0


def test_golden_checksums_tell_what_no_repetition_does() -> None:
    """With a trusted device's checksums the lowest bit, stuck for ever, is found each time."""
    trusted = Products(torch.device("cpu")).run_round(1)["values"]
    device = harmed(submodule="odd.*", phase="forward", kind="bit_flip", pattern="indices", indices=[3], bits=[0])
    device.expect(trusted, "golden")
    said = device.run_round(1)
    assert said["wrong"] == PASSES * len(DTYPES) and said["checked"] == 0
    assert {finding["against"] for finding in said["findings"]} == {"golden"}
    healthy = Products(torch.device("cpu"))
    healthy.expect(trusted, "golden")
    assert healthy.run_round(1)["wrong"] == 0
