"""Planning: how often to save, for given failure rates and costs; formulas, and a simulation that is independent."""
