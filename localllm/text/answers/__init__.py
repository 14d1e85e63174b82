"""Parses a model's text into content, reasoning and tool calls.

    format = answer_format(ChatTemplate.of(tokenizer))                      detect.py, once per model
    reader = AnswerReader(format, tools=tools, prompt=PromptEnd(prompt))    reader.py, once per answer
    parts = [*reader.feed("some text"), *reader.feed(" more"), *reader.end()]       parts.py
    grammar = format.tools.call_grammar(tools, "required", parallel=True, tokenizer=tokenizer)

Decode answers with `skip_special_tokens=False` if `format.needs_special_tokens(tokenizer)`: usually true if markers
contain bars, rarely if they are tags; it depends on the vocabulary.
A grammar forces calls from its first character: it starts after the reasoning if the prompt has opened any.
Does not know: token ids of an answer, requests, HTTP, torch.
"""
