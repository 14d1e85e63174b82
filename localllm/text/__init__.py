"""Text processing: tokenizer, chat template, detokenisation with stop strings, structured output."""
