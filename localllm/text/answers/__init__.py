"""What a model's text says: content, reasoning and tool calls.

    format = answer_format(ChatTemplate.of(tokenizer))      # once per model
    reader = AnswerReader(format, tools=body.tools, prompt=prompt)
    for delta in deltas:
        parts = reader.feed(delta.text)
    parts = reader.end()

The markers of many formats are special tokens: decode with `skip_special_tokens=False` where
`format.needs_special_tokens(tokenizer)`. Usual are special tokens in Llama 3, Mistral, DeepSeek, Granite 3, Phi-4-mini
and gpt-oss; plain text in Hermes, Qwen and GLM.
Does not know: tokens, requests, HTTP, torch.
"""
