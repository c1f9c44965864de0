"""What fine-tuning came to over several seeds: means and standard deviations against the healthy run of each seed."""

from __future__ import annotations

from tools.finetune_table import TunedRun, render_seeds


def run(node: str, seed: int, loss: float | None, accuracy: float | None, **others: object) -> TunedRun:
    """A run of one cell; its validation loss is twice its final loss."""
    known = {"status": "done", "spikes": [], "disagreement": 0.0 if accuracy is not None else None, **others}
    return TunedRun("task", node, seed, known.pop("status"), loss, loss and 2 * loss, accuracy=accuracy, **known)


def test_a_node_is_compared_with_the_healthy_run_of_its_seed() -> None:
    """Increases +1, +3 %; accuracies 52, 60 %, 2 points less and 4 more; a seed that diverged is counted apart."""
    runs = [
        run("healthy", 1, 2.0, 0.54),
        run("n", 1, 2.02, 0.52, disagreement=0.1, spikes=[3, 4]),
        run("healthy", 2, 4.0, 0.56),
        run("n", 2, 4.12, 0.60, disagreement=0.2),
        run("healthy", 3, 3.0, None),
        run("n", 3, 6.0, None, status="diverged"),
    ]
    healthy, node = render_seeds(runs).splitlines()[2:]
    assert healthy == (
        "| task | healthy | 3 of 3 | +0.00 ± 0.00 % | +0.00 ± 0.00 % | 0 | 55.0 ± 1.4 % | +0.0 ± 0.0 | 0.0 ± 0.0 % |"
    )
    assert node == (
        "| task | n | 2 of 3 | +2.00 ± 1.41 % | +2.00 ± 1.41 % | 2 | 56.0 ± 5.7 % | +1.0 ± 4.2 | 15.0 ± 7.1 % |"
    )


def test_one_seed_and_what_is_not_known() -> None:
    """One seed alone has no such table; a node that is done with one seed has no deviation, and none with none."""
    assert render_seeds([run("healthy", 1, 2.0, None), run("n", 1, 2.0, None)]) == ""
    runs = [run("healthy", 1, 2.0, None), run("n", 1, 2.1, None), run("n", 2, None, None, status="failed")]
    assert render_seeds(runs).endswith("| task | n | 1 of 2 | +5.00 % | +5.00 % | 0 | - | - | - |")
    lost = [run("n", 1, None, None, status="nan"), run("n", 2, None, None, status="nan")]
    assert render_seeds(lost).endswith("| task | n | 0 of 2 | - | - | 0 | - | - | - |")
