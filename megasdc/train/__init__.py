"""The loop: what a run is built from, what happens between steps, how a rank starts and ends."""
