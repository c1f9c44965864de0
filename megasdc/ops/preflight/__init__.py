"""Preflight of an unattended run: its configuration, data, hosts, storage, first steps and costs, in one verdict."""
