"""Between the agents of hosts and the front of their launch: addresses, the connection, and both of its ends."""
