"""Which ranks are slower than their peers of the same stage."""
