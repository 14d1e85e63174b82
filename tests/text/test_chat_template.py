"""Prompts equal transformers' `apply_chat_template`; what a template cannot say is refused in its own words."""

import copy
from functools import cache
from typing import Any

import pytest

from localllm.errors import CorruptModel, InvalidParameter, LocalLLMError, UnsupportedModel
from localllm.text.chat_template import ChatTemplate
from localllm.text.tokenizer import Tokenizer
from tests.text import templates
from tests.text.vocabularies import raw_tokenizer, tokenizer

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATES = {
    "chatml": templates.CHATML,
    "llama3": templates.LLAMA3,
    "mistral": templates.MISTRAL,
    "gemma": templates.GEMMA,
    "indented": templates.INDENTED,
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Wetter in <Zürich> & 서울",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "서울"}}}
SYSTEM = {"role": "system", "content": "Be brief."}
ASK = {"role": "user", "content": "What's <b>1 & 1</b>? 🙂"}
ANSWER = {"role": "assistant", "content": "  Two. 둘 "}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [ASK],
    "turns": [ASK, ANSWER, {"role": "user", "content": "and 2 & 2?\n"}],
    "system": [SYSTEM, ASK, ANSWER, ASK],
    "open": [ASK, {"role": "assistant", "content": "The sum is "}],
    "tool": [
        ASK,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "name": "get_weather", "content": '{"sky": "맑음"}'},
    ],
    "thinking": [ASK, {"role": "assistant", "content": "Two.", "reasoning_content": "One and one."}],
}


@cache
def reference() -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=raw_tokenizer("byte_level"), **SPECIAL_TOKENS)


def expected(name: str, chat: list[dict[str, Any]], **options: Any) -> str:
    text = reference().apply_chat_template(
        copy.deepcopy(chat), chat_template=TEMPLATES[name], tokenize=False, **options
    )
    assert isinstance(text, str)
    return text


def chat_template(name: str) -> ChatTemplate:
    return ChatTemplate(TEMPLATES[name], SPECIAL_TOKENS)


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize(
    ("name", "chat"),
    [(name, chat) for name in TEMPLATES for chat in ("one", "turns", "system") if (name, chat) != ("gemma", "system")],
)
def test_prompts_equal_transformers(name: str, chat: str, add_generation_prompt: bool) -> None:
    options = {"add_generation_prompt": add_generation_prompt}
    assert chat_template(name).render(CHATS[chat], **options) == expected(name, CHATS[chat], **options)


@pytest.mark.parametrize("name", ["chatml", "llama3"])
def test_tools_equal_transformers(name: str) -> None:
    want = expected(name, CHATS["tool"], tools=TOOLS, add_generation_prompt=True)
    chat = copy.deepcopy(CHATS["tool"])
    assert chat_template(name).render(chat, tools=TOOLS) == want
    chat[1]["tool_calls"][0]["function"]["arguments"] = '{"city": "서울"}'  # as OpenAI's clients send it
    chat[1]["content"] = None
    assert chat_template(name).render(chat, tools=TOOLS) == want
    assert "서울" in want


@pytest.mark.parametrize("name", ["chatml", "llama3", "gemma"])
@pytest.mark.parametrize("chat", ["open", "turns"])
def test_continue_final_message_equals_transformers(name: str, chat: str) -> None:
    text = chat_template(name).render(CHATS[chat], add_generation_prompt=False, continue_final_message=True)
    assert text == expected(name, CHATS[chat], continue_final_message=True)


def test_continue_final_message_of_mistral_ends_in_the_text() -> None:
    text = chat_template("mistral").render(CHATS["open"], add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("[/INST] The sum is")


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
def test_reasoning_is_read_under_either_name(key: str) -> None:
    chat = [ASK, {"role": "assistant", "content": "Two.", key: "One and one."}]
    want = expected("chatml", CHATS["thinking"], add_generation_prompt=True)
    assert chat_template("chatml").render(chat) == want
    assert "<think>\nOne and one.\n</think>" in want


def test_the_template_s_own_switches_reach_it() -> None:
    assert chat_template("chatml").render([ASK], enable_thinking=False).endswith("<think>\n\n</think>\n\n")
    assert "Today Date: 1 May" in chat_template("llama3").render([ASK], date_string="1 May")
    assert chat_template("chatml").reads("enable_thinking")
    assert not chat_template("mistral").reads("enable_thinking")


PARTS = [{"type": "text", "text": " a "}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    ("source", "content", "want"),
    [
        (templates.MISTRAL, PARTS, "<s>[INST]  a \nb[/INST]"),  # joined: it concatenates strings
        (templates.MISTRAL, ["a", "b"], "<s>[INST] a\nb[/INST]"),
        (templates.GEMMA, PARTS, "<s><start_of_turn>user\nab<end_of_turn>\n<start_of_turn>model\n"),  # as they are
        (templates.PARTS_ONLY, "abc", "user:abc;"),  # wrapped: it loops over parts
        (templates.PARTS_ONLY, PARTS, "user: a b;"),
        (templates.CHATML, [], "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"),
    ],
)
def test_content_arrives_as_the_template_reads_it(source: str, content: Any, want: str) -> None:
    assert ChatTemplate(source, SPECIAL_TOKENS).render([{"role": "user", "content": content}]) == want


def test_developer_is_system_unless_the_template_knows_it() -> None:
    chat = [{"role": "developer", "content": "Be brief."}, ASK]
    assert chat_template("chatml").render(chat) == chat_template("chatml").render([SYSTEM, ASK])
    assert ChatTemplate(templates.DEVELOPER).render(chat).startswith("<developer>Be brief.")


def test_a_role_of_the_template_s_own_is_accepted() -> None:
    chat = [ASK, {"role": "critic", "content": "no"}]
    assert ChatTemplate(templates.DEVELOPER).render(chat).endswith("<critic>no")
    assert "ipython" in chat_template("llama3").render([ASK, {"role": "ipython", "content": "4"}])


def test_function_messages_are_tool_messages() -> None:
    chat = [ASK, {"role": "function", "name": "f", "content": "4"}]
    assert "<tool_response>\n4\n" in chat_template("chatml").render(chat)


def test_absent_fields_sent_as_null_are_absent() -> None:
    chat = [{**ASK, "tool_calls": None, "name": None}, {**ANSWER, "tool_calls": [], "reasoning_content": None}]
    for name in TEMPLATES:
        assert chat_template(name).render(chat) == chat_template(name).render([ASK, ANSWER])


def test_arguments_arrive_as_text_where_the_template_concatenates_them() -> None:
    text = ChatTemplate(templates.TEXT_ARGUMENTS).render(
        [*CHATS["tool"][:1], {"role": "assistant", "content": None, "tool_calls": [CALL]}], tools=TOOLS
    )
    assert text.endswith('get_weather{"city": "서울"}\n')
    assert "assistant" not in text, "this template tells no content by None"


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m.content | length }}{% if m.reasoning_content is none %}{% endif %}{% endfor %}",
        "{% for m in messages %}{{ m.content | length }}{% if m.content is none %}{% endif %}{% endfor %}",
    ],
    ids=["asks about something else", "asks and forgets"],
)
def test_a_call_without_content_is_printed_by_a_template_that_measures_content(source: str) -> None:
    chat = [{"role": "assistant", "content": None, "tool_calls": [CALL]}]
    assert ChatTemplate(source).render([ASK, *chat]).endswith("0")


def test_the_caller_s_messages_are_not_changed() -> None:
    chat = [{**CHATS["tool"][1], "tool_calls": [copy.deepcopy(CALL)]}, {"role": "user", "content": PARTS}]
    before = copy.deepcopy(chat)
    chat_template("chatml").render(chat)
    chat_template("chatml").render(chat, add_generation_prompt=False, continue_final_message=True)
    assert chat == before


def test_a_template_named_tool_use_serves_requests_with_tools() -> None:
    named = ChatTemplate({"default": "plain", "tool_use": "{{ tools|length }} tools"})
    assert named.render([ASK]) == "plain"
    assert named.render([ASK], tools=TOOLS) == "1 tools"
    assert named.reads("tools")


def test_a_tokenizer_brings_its_template_and_special_tokens() -> None:
    tok = Tokenizer(
        raw_tokenizer("byte_level"), special_tokens=SPECIAL_TOKENS, chat_templates={"default": templates.MISTRAL}
    )
    assert ChatTemplate.of(tok).render([ASK]) == expected("mistral", [ASK])
    assert not ChatTemplate.of(tokenizer("byte_level"))


def test_strftime_now_and_generation_blocks_are_known() -> None:
    source = "{% set x = 1 %}{% generation %}{{ strftime_now('%Y')|length }}{{ x }}{% endgeneration %}{{ x }}"
    assert ChatTemplate(source).render([ASK]) == "411"


def refused(call: Any) -> LocalLLMError:
    with pytest.raises(InvalidParameter) as caught:
        call()
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("name", "chat", "words"),
    [
        ("gemma", [SYSTEM, ASK], "System role not supported"),
        ("mistral", [ASK, ASK], "Conversation roles must alternate"),
        ("llama3", [ASK, {"role": "assistant", "tool_calls": [CALL, CALL]}], "single tool-calls at once"),
    ],
)
def test_a_template_s_refusal_is_told_in_its_words(name: str, chat: list[dict[str, Any]], words: str) -> None:
    error = refused(lambda: chat_template(name).render(chat))
    assert words in error.why
    assert error.param == "messages"


@pytest.mark.parametrize(
    ("chat", "words"),
    [
        ([], "empty"),
        ("hi", "must be a list"),
        ({"role": "user"}, "must be a list"),
        (["hi"], "messages[0] must be an object"),
        ([ASK, {"content": "x"}], "messages[1] has an unknown role. It has none."),
        ([{"role": "robot", "content": "x"}], "Got 'robot'"),
        ([{"role": 3, "content": "x"}], "Got 3"),
        ([{"role": "content", "content": "x"}], "Got 'content'"),
        ([{"role": "user"}], "messages[0] has no content"),
        ([{"role": "assistant", "content": None}], "messages[0] has no content"),
        ([{"role": "user", "content": 7}], "Got int"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "Supported: text"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text must be a string"),
        ([{"role": "user", "content": [5]}], "messages[0].content[0] must be an object"),
        ([{"role": "assistant", "tool_calls": "f()"}], "tool_calls must be a list"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], "tool_calls[0] must name a function"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}], "is not JSON"),
    ],
)
def test_malformed_messages_are_refused_by_place(chat: Any, words: str) -> None:
    error = refused(lambda: chat_template("chatml").render(chat))
    assert words in str(error)
    assert error.param == "messages"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"continue_final_message": True}, "continue_final_message"),
        ({"tools": TOOLS}, "tools"),
        ({"enable_thinking": True}, "chat_template_kwargs"),
        ({"tokenize": True}, "chat_template_kwargs"),
    ],
)
def test_what_the_template_would_ignore_is_refused(options: dict[str, Any], param: str) -> None:
    assert refused(lambda: chat_template("mistral").render([ASK], **options)).param == param


@pytest.mark.parametrize(
    "chat", [[ASK, {"role": "assistant", "content": "", "tool_calls": [CALL]}], [{"role": "user", "content": []}]]
)
def test_a_message_without_text_cannot_be_continued(chat: list[dict[str, Any]]) -> None:
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert refused(lambda: chat_template("chatml").render(chat, **options)).param == "continue_final_message"
    hidden = ChatTemplate("{{ messages[0].content }}")
    assert refused(lambda: hidden.render([ASK, ANSWER], **options)).param == "continue_final_message"


@pytest.mark.parametrize("source", [None, {}, {"rag": "x"}])
def test_a_model_without_template_is_pointed_to_completions(source: Any) -> None:
    error = refused(lambda: ChatTemplate(source).render([ASK]))
    assert "/v1/completions" in error.hint


def test_a_broken_template_blames_the_model() -> None:
    with pytest.raises(CorruptModel, match="does not compile"):
        ChatTemplate("{% for m in messages %}").render([ASK])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ raise_exception.__globals__.json }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(source: str) -> None:
    with pytest.raises(UnsupportedModel, match="sandbox forbids"):
        ChatTemplate(source).render([ASK])


@pytest.mark.parametrize("source", ["{{ messages.append(1) }}", "{{ messages[0].update(role='x') }}"])
def test_a_template_cannot_change_what_it_is_given(source: str) -> None:
    with pytest.raises(UnsupportedModel):
        ChatTemplate(source).render([ASK])


@pytest.mark.parametrize("source", ["{{ messages[0].content + 1 }}", "{{ missing.thing }}", "{{ 1 / 0 }}"])
def test_a_template_that_fails_is_an_error_of_the_request(source: str) -> None:
    assert refused(lambda: ChatTemplate(source).render([ASK])).param == "messages"
