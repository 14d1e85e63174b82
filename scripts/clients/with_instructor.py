"""Instructor over OpenAI's SDK: answers as pydantic objects, through a forced call or a JSON schema."""

import instructor
from asked import PERSON_QUESTION, QUESTION, expect_answer
from checking import KEY, MODEL, URL, refused, run
from instructor.core.exceptions import InstructorRetryException
from openai import OpenAI
from pydantic import BaseModel

plain = OpenAI(base_url=URL, api_key=KEY, max_retries=0)
client = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)
by_call = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
question = [{"role": "user", "content": PERSON_QUESTION}]


class Person(BaseModel):
    name: str
    age: int
    city: str


def chat() -> None:
    messages = [{"role": "user", "content": QUESTION}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, response_model=None)
    expect_answer(answer.choices[0].message.content)


def stream() -> None:
    parts = list(client.create_partial(Person, messages=question, model=MODEL))
    assert Person(**parts[-1].model_dump())  # earlier parts may lack fields


def tools() -> None:
    person = by_call.create(Person, messages=question, model=MODEL, max_retries=0)
    assert isinstance(person, Person)


def schema() -> None:
    person = client.create(Person, messages=question, model=MODEL, max_retries=0)
    assert isinstance(person, Person)
    json_object = instructor.from_openai(plain, mode=instructor.Mode.JSON)
    assert isinstance(json_object.create(Person, messages=question, model=MODEL, max_retries=0), Person)


def errors() -> None:
    with refused(InstructorRetryException, saying="nobody-has-this"):
        client.create(Person, messages=question, model="nobody-has-this", max_retries=0)
    with refused(InstructorRetryException, saying="top_p"):
        client.create(Person, messages=question, model=MODEL, max_retries=0, top_p=7)
    stranger = instructor.from_openai(plain.with_options(api_key="wrong"))
    with refused(InstructorRetryException, saying="401"):
        stranger.create(Person, messages=question, model=MODEL, max_retries=0)


if __name__ == "__main__":
    run(globals())
