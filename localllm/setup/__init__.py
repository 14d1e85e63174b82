"""The life of an install: update, uninstall, the service, shell completion and the manual page.

Does not know: the other verbs (cli/), how a server is built (up.py).
"""
