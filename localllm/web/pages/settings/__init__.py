"""The settings page: settings with their sources, keys, storage, versions."""
