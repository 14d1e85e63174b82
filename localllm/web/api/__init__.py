"""What machines talk to: health probes and one folder per dialect. A dialect is a translator, nothing more."""
