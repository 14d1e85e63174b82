"""The models that there are: names, aliases, files on this machine, the hub, and suggestions."""
