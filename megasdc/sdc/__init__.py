"""Silent data corruption: traces, golden traces, comparison, votes, verdicts and incidents."""
