"""Calls to tools of servers: consent, runs, results."""
