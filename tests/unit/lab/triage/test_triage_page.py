"""What people see of a triage."""

from __future__ import annotations

import io

from rich.console import Console

from megasdc.lab.triage.conclusion import FarSample, LargeUpdate, StepComparison, StepEvidence, decide_triage
from megasdc.lab.triage.step_data import MicroBatchData, SampleData, StepData, TextPart
from megasdc.lab.triage.triage import DeviceReport, Triage
from megasdc.lab.triage.triage_page import triage_page
from megasdc.metrics.writer import ParameterDetails, SampleLosses, StepDetails
from megasdc.output.page import print_page


def batch(micro_batch: int, document: int, *, dropped: bool = False) -> MicroBatchData:
    """A micro-batch of one sample of one document."""
    part = TextPart(document, 0, 33, "files 'texts'", document + 10, f"text {document}\n")
    sample = SampleData(100 + micro_batch, "data/train.bin", 100 + micro_batch, 0, [1] * 33, [part])
    return MicroBatchData(0, micro_batch, dropped, False, [sample])


def test_documents_and_parameters_that_stand_out_come_first() -> None:
    """The verdict, the document of the strange sample, what was compared, and rows in the order of what is unusual."""
    parameters = {
        "2.weight": ParameterDetails(1.0, 0.5, 0, 10.0, 0.1, 1.0),
        "3.weight": ParameterDetails(0.5, 0.5, 0, 10.0, 5.0, 1.0),
    }
    losses = [
        SampleLosses(0, 0, [3.0]),
        SampleLosses(0, 1, [11.0]),
        SampleLosses(0, 2, [3.1]),
        SampleLosses(0, 3, [3.2]),
    ]
    evidence = StepEvidence(
        StepComparison(1000),
        True,
        StepComparison(6, note="no trace of the run was compared"),
        far=[],
        samples=[FarSample((0, 1, 0), 11.0, 3.1, 20.0)],
        num_samples=4,
        updates=[LargeUpdate("3.weight", "update over weight", 0.5, 9.0)],
    )
    batches = [batch(0, 5), batch(1, 6), batch(2, 7), batch(3, 8), batch(4, 9, dropped=True)]
    result = Triage(
        run="run",
        step=7,
        since=4,
        folder="run/triage/step_00000007",
        hosts=[["node1"], ["node1"]],
        conclusion=decide_triage(evidence),
        evidence=evidence,
        step_details=StepDetails(7, 5.0, 1.0, losses, parameters),
        data=StepData("run", 7, 1, 1, 5, None, 4, 8, False, batches),
        devices=[DeviceReport(0, [0, 1], "GPU 0", "degraded", "heat", {"ecc_corrected": 4})],
    )
    out = io.StringIO()
    print_page(triage_page(result, 2), Console(file=out, width=200))
    text = out.getvalue()
    assert text.startswith("step 7 of run: data\n")
    assert "Sample 101 (replica 0, micro-batch 1) has loss 11, usual is 3.1: document 16 of files 'texts'." in text
    assert "the checkpoint of step 4 on node1, in run/triage/step_00000007" in text
    assert "6 values compared, all equal; no trace of the run was compared" in text
    documents = text[text.index("samples, those") :].splitlines()
    assert "16 of files" in documents[2] and "+20.0" in documents[2] and "3 more" in documents[4]
    listed = text[text.index("gradients before") :].splitlines()
    assert "3.weight" in listed[2] and "update over weight 9 times the usual" in listed[2] and "2.weight" in listed[3]
    assert "degraded" in text and "ecc_corrected 4" in text
    assert result.as_dict()["conclusion"]["verdict"] == "data"
