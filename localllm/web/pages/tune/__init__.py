"""The tuning wizard: find settings for a goal by trying them, in four steps."""
