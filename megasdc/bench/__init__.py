"""How fast is it? Measurements as programs, each with its bar, its machine and its interval; none of them a test."""
