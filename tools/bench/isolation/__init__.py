"""Replicas that are left out: a campaign of faults that go on."""
