"""Other forms of a checkpoint: universal, Hugging Face; both ways."""
