"""Plans before a run: checkpoint intervals, hosts, audits, drop thresholds."""
