"""Files of a message, and passages of files that are too long to be read whole."""
