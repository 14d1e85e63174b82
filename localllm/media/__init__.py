"""Media: pictures from bytes, data URLs and web addresses to pixels, within bounds that are checked first."""
