"""Products and decode steps on a CPU in C, called through ctypes."""
