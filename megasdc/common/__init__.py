"""Modules that every part uses: errors, durable files, locks, origins, this host, connections, versions."""
