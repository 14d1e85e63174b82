"""Text on its way in and out: tokenizer, chat template, detokenisation with stop strings."""
