"""The whole step on the device that is here: what scripts/gpu_check asks of a GPU, asked of a CPU in small as well."""
