"""Measuring: workloads, the load client and `localllm bench`. The search for good settings builds on these."""
