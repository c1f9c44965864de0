"""Did a rank compute something else? Traces, golden traces, comparison, verdicts."""
