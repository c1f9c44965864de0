"""How do I start a run and know how it ended? A checked front for DeepSpeed's launcher, with a true exit code."""
