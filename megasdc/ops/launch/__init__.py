"""Launcher: a checked front for DeepSpeed's launcher, with a reliable exit code."""
