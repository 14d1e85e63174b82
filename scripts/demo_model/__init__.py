"""The parts of scripts/make_demo_model: the demo model's training text, its tokenizer, and its training loop."""
