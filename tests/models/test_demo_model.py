"""The bundled demo model: small, loadable, and able to answer what it was made for.

The questions come from scripts/demo_model/held_out.py; the corpus generator refuses to write them, so an answer
shows that the model understood the wording and did not only learn it by heart.
"""

import hashlib
import itertools
import json
import re
import sys
from functools import cache
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from localllm.engine.params import SamplingParams
from localllm.llm import LLM
from localllm.models.library.catalog import resolve_model

SCRIPTS = str(Path(__file__).resolve().parents[2] / "scripts")
sys.path.insert(0, SCRIPTS)
from demo_model.corpus import conversations, render  # noqa: E402
from demo_model.held_out import HELD_OUT, HELD_OUT_FORMS, JSON_HELD_OUT, normal_form  # noqa: E402
from demo_model.training import END_OF_TEXT, IM_END, answer  # noqa: E402

sys.path.remove(SCRIPTS)

FOLDER = resolve_model("demo").path
SUMS = "What is 6 + 7?"  # asked apart: the model gets about four sums in ten right
ASKED = [(question, word) for question, word in HELD_OUT if word and question != SUMS]
OTHER_WORDINGS = [
    ("Hello", "Hello"),
    ("Thanks a lot!", "welcome"),
    ("What can you do?", "localllm"),
    ("What is the capital of France?", "Paris"),
    ("How do I start localllm?", "localllm up"),
]


@cache
def demo() -> tuple[Any, Tokenizer]:
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    return model, Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def ask(*messages: tuple[str, str], tools: list[dict[str, Any]] | None = None) -> tuple[str, bool]:
    model, tokenizer = demo()
    return answer(model, tokenizer, [{"role": role, "content": text} for role, text in messages], tools)


def test_folder_is_small_enough_to_ship() -> None:
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.suffix != ".pyc") <= 12_000_000


def test_model_has_two_to_six_million_parameters() -> None:
    assert 2_000_000 <= sum(p.numel() for p in demo()[0].parameters()) <= 6_000_000


@cache
def greedy_answers() -> dict[str, tuple[str, bool]]:
    """The answers to all questions, decoded together: at most 160 tokens each, and whether the model stopped."""
    model, tokenizer = demo()
    questions = [question for question, _ in ASKED + OTHER_WORDINGS]
    prompts = [f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in questions]
    tokenizer.enable_padding(direction="left", pad_id=END_OF_TEXT)
    rows = tokenizer.encode_batch(prompts)
    tokenizer.no_padding()
    ids, mask = torch.tensor([row.ids for row in rows]), torch.tensor([row.attention_mask for row in rows])
    out = model.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=160, eos_token_id=IM_END, pad_token_id=END_OF_TEXT
    )[:, ids.shape[1] :]
    return {q: (tokenizer.decode(row.tolist()), IM_END in row) for q, row in zip(questions, out, strict=True)}


@pytest.mark.parametrize(("question", "word"), ASKED + OTHER_WORDINGS, ids=lambda value: value[:40])
def test_answers_and_stops(question: str, word: str) -> None:
    text, ended = greedy_answers()[question]
    assert re.search("|".join(map(re.escape, word.split("|"))), text), text
    assert ended


@pytest.mark.xfail(reason="too few training steps for sums; the model card says so", strict=True)
def test_adds_a_sum_it_has_not_seen() -> None:
    assert ask(("user", SUMS))[0] == "6 + 7 = 13"


def test_remembers_a_name_within_a_chat() -> None:
    text, ended = ask(
        ("system", "You are a helpful assistant."),
        ("user", "My name is Clara."),
        ("assistant", "Nice to meet you, Clara! What would you like to know?"),
        ("user", "What is the capital of Italy?"),
        ("assistant", "The capital of Italy is Rome."),
        ("user", "What is my name?"),
    )
    assert "Clara" in text
    assert ended


def test_json_answer_parses() -> None:
    text, ended = ask(("user", JSON_HELD_OUT))
    assert json.loads(text) == {"name": "Clara", "age": 27, "city": "Rome"}
    assert ended


def test_calls_a_function_it_was_given() -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    function = {"name": "get_weather", "description": "Get the weather of a city", "parameters": parameters}
    text, ended = ask(
        ("user", "What is the weather like in Paris?"), tools=[{"type": "function", "function": function}]
    )
    body = text.removeprefix("<tool_call>").removesuffix("</tool_call>")
    assert json.loads(body) == {"name": "get_weather", "arguments": {"city": "Paris"}}
    assert ended


def test_still_answers_after_a_thousand_tokens() -> None:
    stream = itertools.chain.from_iterable(messages for messages, tools in conversations(11) if not tools)
    chat: list[tuple[str, str]] = []
    turns = (message for message in stream if message["role"] != "system")
    while sum(len(text) for _, text in chat) < 3000:
        chat.append((next(turns)["role"], next(turns)["content"]))
    model, tokenizer = demo()
    messages = [{"role": role, "content": text} for role, text in [*chat, ("user", "What is a KV cache?")]]
    text, ended = answer(model, tokenizer, messages)
    assert "keys and values" in text
    assert ended


def test_a_copy_with_a_longer_context_answers_after_a_prompt_that_the_demo_refuses(tmp_path: Path) -> None:
    loader = SourceFileLoader("make_demo_model", f"{SCRIPTS}/make_demo_model")
    script = module_from_spec(spec_from_loader(loader.name, loader))  # type: ignore[arg-type]
    loader.exec_module(script)
    script.copy_with_context(8192, tmp_path)
    rules = "Rule: answer politely, in whole sentences, and keep to the question. " * 125
    (reply,) = LLM(str(tmp_path)).chat(
        [{"role": "system", "content": rules}, {"role": "user", "content": "What is the capital of France?"}],
        SamplingParams(temperature=0, max_tokens=20),
    )
    assert len(reply.prompt_token_ids) > 2048
    assert "Paris" in reply.outputs[0].text


def test_text_of_any_kind_comes_back() -> None:
    tokenizer = demo()[1]
    text = "Grüße, 你好 🙂\n\n\t1234 x\x00y <b>  two  spaces"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert [tokenizer.id_to_token(i) for i in tokenizer.encode("120").ids] == ["1", "2", "0"]


def test_template_says_what_the_model_was_trained_on() -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    assert tokenizer.eos_token_id == IM_END
    for messages, tools in itertools.islice(conversations(5), 60):
        written = "".join(text for text, _ in render(messages, tools))
        assert tokenizer.apply_chat_template(messages, tools=tools, tokenize=False) == written
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_same_seed_writes_the_same_corpus_without_held_out_questions() -> None:
    def digest(seed: int) -> str:
        some = list(itertools.islice(conversations(seed), 400))
        asked = {normal_form(m["content"]) for messages, _ in some for m in messages if m["role"] == "user"}
        assert not asked & HELD_OUT_FORMS
        return hashlib.sha256(json.dumps(some).encode()).hexdigest()

    assert digest(1) == digest(1)
    assert digest(1) != digest(2)
