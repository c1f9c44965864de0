"""The pipeline engine and the places where features look in."""
