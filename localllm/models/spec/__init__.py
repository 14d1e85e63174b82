"""What config.json says about a model, checked and in one form for all families."""
