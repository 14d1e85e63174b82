"""The shared parts of all pages: the document, navigation, live updates, rendering, files, errors, login."""
