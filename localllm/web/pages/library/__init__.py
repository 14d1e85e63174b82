"""The Models page: installed models and their state, search, downloads."""
