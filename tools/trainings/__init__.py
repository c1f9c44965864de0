"""Small trainings that tests and benchmarks share: engines of other programs, planted faults, other right numerics."""
