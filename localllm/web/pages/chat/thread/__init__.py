"""A chat on the screen: open, edit, versions, compare, outline."""
