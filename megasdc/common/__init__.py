"""What every part uses: errors, durable files, locks, processes, versions."""
