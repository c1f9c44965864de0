"""Programs that run on the hosts of a launch; their source is sent there, so they import nothing from megasdc."""
