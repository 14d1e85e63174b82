"""The logs page: the last log lines of this server, live."""
