"""Drafters with weights of their own: layers that guess the next tokens of a model, for the model to verify."""
