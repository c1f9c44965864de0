"""Detection in a run: checks of each step, settlement of findings, golden traces, reports of incidents."""
