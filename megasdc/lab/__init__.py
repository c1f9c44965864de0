"""What is asked afterwards or in experiments: pages, comparisons, studies, sweeps, triage, plans."""
