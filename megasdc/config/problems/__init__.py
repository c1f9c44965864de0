"""Problems of a configuration: contradictions between fields, each with its path, the value and the remedy."""
