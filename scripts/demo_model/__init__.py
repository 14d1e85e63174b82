"""The parts of scripts/make_demo_model: what the demo model is taught, its tokenizer, and its training loop."""
