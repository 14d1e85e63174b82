"""The wizard: settings for a goal, found by trying them, in four steps."""
