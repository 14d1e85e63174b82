"""Logs: the rotated file, the latest lines in memory, and the record of unhandled faults."""
