"""Health of a run: what each of its ranks does, and how fast they and their links are."""
