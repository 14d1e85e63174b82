"""The model that an empty chat suggests."""
