"""What a model's text says: content, reasoning and tool calls.

    format = answer_format(ChatTemplate.of(tokenizer))                      detect.py, once per model
    reader = AnswerReader(format, tools=tools, prompt=PromptEnd(prompt))    reader.py, once per answer
    parts = [*reader.feed("some text"), *reader.feed(" more"), *reader.end()]       parts.py
    grammar = format.tools.call_grammar(tools, "required", parallel=True, tokenizer=tokenizer)

Answers are to be decoded with `skip_special_tokens=False` where `format.needs_special_tokens(tokenizer)`: usually where
markers stand in bars, rarely where they are tags; it depends on the vocabulary.
A grammar forces calls from the first character on: it begins behind the reasoning, where the prompt has opened any.
Does not know: tokens' ids in an answer, requests, HTTP, torch.
"""
