"""Media: pictures and sound from bytes to pixels, samples and windows of speech, within bounds that are checked."""
