"""Simon Willison's llm, which reads extra-openai-models.yaml in its folder, here a temporary one."""

import json
import os
import tempfile
from pathlib import Path

from asked import PERSON, PERSON_QUESTION, QUESTION, WEATHER_QUESTION, expect_answer
from checking import KEY, MODEL, URL, refused, run

folder = tempfile.TemporaryDirectory(prefix="llm-")
os.environ["LLM_USER_PATH"] = folder.name
entry = """\
- model_id: {id}
  model_name: {name}
  api_base: {url}
  api_key_name: localllm
  supports_tools: true
  supports_schema: true
"""
entries = (
    entry.format(id=MODEL, name=MODEL, url=URL)
    + entry.format(id="nobody", name="nobody-has-this", url=URL)
    + entry.format(id="speaker", name=MODEL, url=URL)
    + "  responses: true\n"
)
(Path(folder.name) / "extra-openai-models.yaml").write_text(entries)

import llm  # noqa: E402  (it looks for its folder as it is imported)
import openai  # noqa: E402

model = llm.get_model(MODEL)


def chat() -> None:
    expect_answer(model.prompt(QUESTION, key=KEY, stream=False).text())


def stream() -> None:
    expect_answer("".join(model.prompt(QUESTION, key=KEY)))


def tools() -> None:
    """llm has no tool_choice: the model decides whether to call."""
    asked = []

    def get_weather(city: str) -> str:
        """Get the weather of a city"""
        asked.append(city)
        return '{"temperature": 21, "sky": "sunny"}'

    answer = model.chain(WEATHER_QUESTION, tools=[get_weather], key=KEY).text()
    assert asked == ["Paris"], answer
    assert "sunny" in answer


def schema() -> None:
    answer = model.prompt(PERSON_QUESTION, schema=PERSON, key=KEY)
    assert json.loads(answer.text()) == {"name": "Clara", "age": 27, "city": "Rome"}


def errors() -> None:
    with refused(openai.NotFoundError, saying="nobody-has-this"):
        llm.get_model("nobody").prompt(QUESTION, key=KEY).text()
    with refused(openai.BadRequestError, saying="top_p"):
        model.prompt(QUESTION, key=KEY, top_p=0.0).text()
    with refused(openai.AuthenticationError, saying="401"):
        model.prompt(QUESTION, key="wrong").text()


def responses() -> None:
    expect_answer(llm.get_model("speaker").prompt(QUESTION, key=KEY, stream=False).text())
    expect_answer("".join(llm.get_model("speaker").prompt(QUESTION, key=KEY)))


if __name__ == "__main__":
    run(globals())
