"""From a checkpoint's tensors to a loaded model."""
