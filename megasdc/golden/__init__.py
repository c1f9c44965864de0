"""Record golden traces, and verify ranks against them: alone, under the launcher, or every device by itself."""
