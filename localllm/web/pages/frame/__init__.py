"""What every page shares: the document around it, navigation, live updates, rendering, files, errors, sign-in."""
