"""Any checkpoint format becomes named tensors; one file a format."""
