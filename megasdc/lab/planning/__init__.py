"""Plans before a run: a first configuration, checkpoint intervals, hosts, audits, drop thresholds."""
