"""The API for programs: health probes and one package per dialect. A dialect only translates."""
