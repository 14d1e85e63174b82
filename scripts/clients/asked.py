"""Questions whose answers the demo model knows, and a function that it calls."""

QUESTION = "What is a KV cache?"
WEATHER_QUESTION = "What is the weather like in Paris?"
PERSON_QUESTION = "Give me a JSON object with name Clara, age 27 and city Rome."
WEATHER_PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "Get the weather of a city", "parameters": WEATHER_PARAMETERS}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}},
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}


def expect_answer(text: str | None) -> None:
    assert "keys and values" in (text or ""), f"not an answer to {QUESTION!r}: {text!r}"
