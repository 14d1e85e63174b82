"""One configurable decoder: its builder, its layers, and its decode steps as programs for the native library."""
