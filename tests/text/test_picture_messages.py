"""Pictures in messages: a template renders a mark for each, in order, and no text can stand for one."""

from __future__ import annotations

from typing import Any

import pytest

from localllm.errors import InvalidParameter, UnsupportedParameter
from localllm.text.chat_template import ChatTemplate
from localllm.text.messages import BREAK
from tests.media.pictures import MARK, MARKS, SEEING
from tests.text.templates import CHATML

STRINGS = "{% for message in messages %}{{ message.role + ':' + message.content + '|' }}{% endfor %}"
URLS = SEEING.replace("part.type == 'image'", "part.type == 'image_url'")
FIRST = (
    "{% for message in messages %}{{ message.role + ':' }}{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content | selectattr('type', 'equalto', 'image') %}<|endoftext|>{% endfor %}"
    "{% for part in message.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}{% endfor %}{% endif %}|"
    "{% endfor %}"
)
NOT_OF_TOOLS = SEEING.replace("part.type == 'image'", "part.type == 'image' and message.role != 'tool'").replace(
    "part.text", "part.text | default('')"
)


def image(name: str) -> dict[str, Any]:
    return {"type": "image", "media": name}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def chat(*content: Any, role: str = "user", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": list(content), **more}


def call(*names: str) -> dict[str, Any]:
    calls = [{"type": "function", "id": name, "function": {"name": name, "arguments": "{}"}} for name in names]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source).of_seeing(MARKS)


@pytest.mark.parametrize("source", [SEEING, URLS, STRINGS, FIRST, CHATML])
def test_every_template_renders_each_picture_once_and_in_order(source: str) -> None:
    messages = [chat(text("a"), image("one"), text("b"), image("two")), chat(text("yes"), role="assistant"),
                chat(image("three"))]  # fmt: skip
    made = template(source)
    assert made.render(messages).count(MARK) == 3
    assert made.pictures(messages) == ["one", "two", "three"]


def test_a_template_without_parts_gets_the_mark_in_the_text() -> None:
    rendered = template(STRINGS).render([chat(image("one"), text("What is it?"))], add_generation_prompt=False)
    assert rendered == f"user:{MARK}\nWhat is it?|"


@pytest.mark.parametrize("where", ["user", "system", "assistant", "tool", "call", "reasoning", "tools", "string"])
def test_marks_in_texts_are_broken_up(where: str) -> None:
    bad, tools = f"a{MARK}b[IMG]c", None
    messages: list[dict[str, Any]] = [chat(image("one"))]
    if where == "tools":
        tools = [{"type": "function", "function": {"name": "f", "description": bad}}]
    elif where == "call":
        arguments = {"name": "f", "arguments": {"x": bad}}
        messages.append({**call("f"), "tool_calls": [{"type": "function", "id": "1", "function": arguments}]})
    elif where == "reasoning":
        messages.append({"role": "assistant", "content": bad, "reasoning_content": bad})
    elif where == "string":
        messages.append({"role": "user", "content": bad})
    else:
        messages.append(chat(text(bad), role=where))
    rendered = template(SEEING).render(messages, tools=tools, add_generation_prompt=False)
    assert rendered.count(MARK) == 1
    assert "[IMG]" not in rendered
    if where not in ("tools", "call"):
        assert f"a<{BREAK}|endoftext|>b[{BREAK}IMG]c" in rendered


def test_pictures_in_results_of_tools_stay_there_if_the_template_renders_them() -> None:
    messages = [chat(text("Look.")), call("f", "g"), chat(text("here"), image("one"), role="tool", name="f"),
                chat(image("two"), role="tool", name="g"), chat(image("three"))]  # fmt: skip
    rendered = template(SEEING).render(messages)
    assert f"<|im_start|>tool\nhere{MARK}<|im_end|>\n<|im_start|>tool\n{MARK}<|im_end|>" in rendered
    moved = template(NOT_OF_TOOLS)
    rendered = moved.render(messages)
    assert moved.pictures(messages) == template(SEEING).pictures(messages) == ["one", "two", "three"]
    assert (
        "<|im_start|>tool\nhere<|im_end|>\n<|im_start|>tool\nSee the pictures below.<|im_end|>\n<|im_start|>user\n"
        f"Pictures from the result of f:{MARK}Pictures from the result of g:{MARK}<|im_end|>\n"
    ) in rendered


@pytest.mark.parametrize(
    ("part", "what"),
    [
        ({"type": "video_url"}, "is a video. Only pictures are read."), ({"type": "input_audio"}, "is sound."),
        ({"type": "file", "file": {}}, "is a file."), ({"type": "image_embeds"}, "is embeddings of a picture."),
    ],
)  # fmt: skip
def test_other_media_are_refused_by_name(part: dict[str, Any], what: str) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        template(SEEING).render([chat(part)])
    assert str(caught.value).startswith(f"messages[0].content[0] {what}")


def test_a_model_that_reads_text_refuses_pictures_and_leaves_marks_alone() -> None:
    plain = ChatTemplate(STRINGS)
    with pytest.raises(InvalidParameter, match="is of type 'image'"):
        plain.render([chat(image("one"))])
    assert MARK in plain.render([chat(text(MARK))])


def test_a_message_that_ends_with_a_picture_cannot_be_continued() -> None:
    with pytest.raises(InvalidParameter, match="no text to continue"):
        template(SEEING).render(
            [chat(text("a"), image("one"))], add_generation_prompt=False, continue_final_message=True
        )
