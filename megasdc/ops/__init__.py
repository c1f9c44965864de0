"""What surrounds a run on its hosts: launch, health, supervision, preflight, stress, golden fleets, archives."""
