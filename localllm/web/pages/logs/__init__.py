"""The logs: the last lines of this server, as they come."""
