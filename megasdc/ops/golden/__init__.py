"""Recording of golden traces, and verification of ranks: alone, under the launcher, or every device by itself."""
