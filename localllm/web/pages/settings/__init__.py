"""The settings: what is set and from where, keys, what is stored, what this program is."""
