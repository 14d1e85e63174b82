"""A model described by its config.json, checked and in one form for all families."""
