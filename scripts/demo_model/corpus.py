"""Conversations for the demo model, generated from the patterns of facts.py and chat.py with a seed.

`conversations(seed)` is an endless stream; the same seed gives the same bytes. No text from outside the project is
used.
Questions in held_out.py never appear.
Does not know: tokens, tensors.
"""

# ruff: noqa: E501  (a pattern is easier to read on one line)

import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

from . import chat, facts
from .held_out import HELD_OUT_FORMS, normal_form

Message = dict[str, Any]
CHOICE = re.compile(r"\[([^\[\]]*)\]")
SMALL_I = re.compile(r"\bi\b")

PREFIXES = [
    "please ", "hi, ", "hey, ", "hello! ", "can you tell me: ", "tell me, ", "so, ", "ok, ", "quick question: ", "i have a question: ",
    "i wonder, ", "could you tell me, ", "sorry, but ", "and ", "now ", "next question: ", "one more question: ", "i am new to this. ",
    "please answer: ", "another question: ", "hello, ", "good morning. ", "do you know ", "i would like to know: ",
]  # fmt: skip
SUFFIXES = [
    " please",
    " thanks",
    " thank you!",
    " i am curious.",
    " please be brief.",
    " i am new to this.",
    " thanks in advance.",
    " (short answer)",
    " i want to learn.",
]
MORE = [
    "[tell me more|more|more details|more please|go on|continue|what else|can you say more|anything else|say more|can you tell me more|explain more|give me more details|and][| about it| about that][|?|.]"
]
SLOTS: dict[str, Callable[[random.Random], str]] = {
    "c": lambda rng: rng.choice(list(chat.CAPITALS)),
    "p": lambda rng: rng.choice(chat.PEOPLE),
    "t": lambda rng: rng.choice([*chat.HAIKUS, *chat.HAIKU_OTHER]),
}


def expand(pattern: str, rng: random.Random) -> str:
    """Expand a pattern to one text: every `[a|b]` becomes a or b, innermost first."""
    while match := CHOICE.search(pattern):
        pattern = pattern[: match.start()] + rng.choice(match[1].split("|")) + pattern[match.end() :]
    return re.sub(r" {2,}", " ", pattern).strip()


def ask(rng: random.Random, patterns: list[str], *, plain: bool = False, **slots: str) -> str:
    """Return a user's message from one of `patterns`, filled and decorated, but never a held-out question."""
    while True:
        text = expand(rng.choice(patterns), rng)
        for name, value in slots.items():
            text = text.replace("{" + name + "}", value)
        for name, fill in SLOTS.items():
            if "{" + name + "}" in text:
                text = text.replace("{" + name + "}", fill(rng))
        dressed = text if plain else decorate(text, rng)
        if not {normal_form(text), normal_form(dressed)} & HELD_OUT_FORMS:
            return dressed


def decorate(text: str, rng: random.Random) -> str:
    """Vary a question as people do: politeness, case, missing punctuation, a typing error."""
    if rng.random() < 0.22:
        text = rng.choice(PREFIXES) + text
    if rng.random() < 0.08:
        text += rng.choice(SUFFIXES)
    if rng.random() < 0.25:
        text = text.rstrip("?.! ")
    style = rng.random()
    if style < 0.6:
        text = SMALL_I.sub("I", text[:1].upper() + text[1:])
    elif style < 0.85:
        text = text.lower()
    if rng.random() < 0.05 and len(text) > 12:
        at = rng.randrange(2, len(text) - 2)
        text = rng.choice(
            [
                text[:at] + text[at + 1 :],
                text[:at] + text[at + 1] + text[at] + text[at + 2 :],
                text[:at] + text[at] + text[at:],
            ]
        )
    return text


class Writer:
    """Writes one conversation at a time. Each `_kind` method adds one exchange to `self.messages`."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.messages: list[Message] = []
        self.user_name: str | None = None
        self.kinds: list[tuple[Callable[[], None], float]] = [
            (self._term, 25), (self._question, 19), (self._small_talk, 18), (self._little_fact, 5), (self._capital, 6),
            (self._pair, 5), (self._foreign_word, 2.5), (self._list, 4), (self._calendar, 1.5), (self._haiku, 4), (self._code, 6),
            (self._arithmetic, 11), (self._count, 1), (self._json, 6), (self._unknown, 9), (self._unable, 4), (self._repeat, 3),
            (self._name, 3.5),
        ]  # fmt: skip

    def conversation(self) -> list[Message]:
        """Return a conversation of mostly few exchanges, with or without a system prompt."""
        rng = self.rng
        self.messages, self.user_name = [], None
        if rng.random() < 0.3:
            self.messages.append({"role": "system", "content": rng.choice(chat.SYSTEM_PROMPTS)})
        turns = rng.choices([1, 2, 3, rng.randint(4, 6), rng.randint(7, 24)], [40, 20, 15, 15, 10])[0]
        exchanges, weights = zip(*self.kinds, strict=True)
        for _ in range(turns):
            rng.choices(exchanges, weights)[0]()
        return self.messages

    def _say(self, user: str, assistant: str) -> None:
        self.messages += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]

    def _term(self) -> None:
        term = self.rng.choice(facts.TERMS)
        self._say(ask(self.rng, facts.WHAT, t=expand(self.rng.choice(term.asked), self.rng)), term.answer)
        if self.rng.random() < 0.25:
            self._say(ask(self.rng, MORE), term.more)

    def _ask_entry(self, entries: list[facts.Entry]) -> None:
        entry = self.rng.choice(entries)
        self._say(ask(self.rng, entry.asked), entry.answer)

    def _question(self) -> None:
        self._ask_entry(facts.QUESTIONS[:7] if self.rng.random() < 0.3 else facts.QUESTIONS)  # most common ones first

    def _small_talk(self) -> None:
        self._ask_entry(facts.SMALL_TALK[:10] if self.rng.random() < 0.45 else facts.SMALL_TALK)

    def _little_fact(self) -> None:
        self._ask_entry(facts.LITTLE_FACTS)

    def _capital(self) -> None:
        country, city = self.rng.choice(list(chat.CAPITALS.items()))
        if self.rng.random() < 0.8:
            answer = f"The capital of {country} is {city}."
            self._say(ask(self.rng, chat.CAPITAL_QUESTIONS, c=country), answer)
        else:
            self._say(ask(self.rng, chat.CAPITAL_REVERSE, k=city), f"{city} is the capital of {country}.")

    def _pair(self) -> None:
        rng = self.rng
        kind = rng.choice(["colour", "colour", "opposite", "opposite", "sound"])
        if kind == "colour":
            thing, colour = rng.choice(list(chat.COLOURS.items()))
            self._say(ask(rng, chat.COLOUR_QUESTIONS, c=thing), f"{thing[0].upper()}{thing[1:]} is {colour}.")
        elif kind == "opposite":
            word, other = rng.choice(list(chat.OPPOSITES.items()))
            self._say(ask(rng, chat.OPPOSITE_QUESTIONS, c=word), f"The opposite of {word} is {other}.")
        else:
            animal, sound = rng.choice(list(chat.SOUNDS.items()))
            self._say(ask(rng, chat.SOUND_QUESTIONS, c=animal), f"A {animal} says {sound}.".replace("A owl", "An owl"))

    def _foreign_word(self) -> None:
        language = self.rng.choice(list(chat.WORDS))
        word, foreign = self.rng.choice(list(chat.WORDS[language].items()))
        self._say(ask(self.rng, chat.WORD_QUESTIONS, w=word, l=language), f'In {language}, {word} is "{foreign}".')

    def _list(self) -> None:
        rng = self.rng
        thing = rng.choice(list(chat.LISTS))
        items = chat.LISTS[thing].split(",")
        n = rng.randint(2, min(7, len(items)))
        things = chat.PLURALS.get(thing, thing + "s")
        number = chat.NUMBER_WORDS[n] if rng.random() < 0.6 else str(n)
        if rng.random() < 0.75:
            self._say(
                ask(rng, chat.LIST_QUESTIONS, n=number, things=self._spelling(things)),
                "\n".join(f"- {i}" for i in items[:n]),
            )
        else:
            lines = "\n".join(f"{k}. {i}" for k, i in enumerate(items[:n], 1))
            self._say(ask(rng, chat.NUMBERED_QUESTIONS, n=number, things=self._spelling(things)), lines)

    def _spelling(self, word: str) -> str:
        return word.replace("colour", "color") if self.rng.random() < 0.4 else word

    def _calendar(self) -> None:
        rng = self.rng
        names = rng.choice([chat.WEEK, chat.MONTHS])
        kind = "day" if names is chat.WEEK else "month"
        at, step = rng.randrange(len(names)), rng.choice([1, -1])
        word = "after" if step == 1 else "before"
        patterns = [
            f"[which|what] {kind} [comes|is] {word} {names[at]}?",
            f"what comes {word} {names[at]}?",
            f"name the {kind} {word} {names[at]}.",
        ]
        self._say(ask(rng, patterns), f"{names[(at + step) % len(names)]} comes {word} {names[at]}.")

    def _haiku(self) -> None:
        rng = self.rng
        draw = rng.random()
        if draw < 0.6:
            topic, haiku = rng.choice(list(chat.HAIKUS.items()))
            self._say(ask(rng, chat.HAIKU_QUESTIONS, t=topic), haiku)
        elif draw < 0.9:
            topic = rng.choice(chat.HAIKU_OTHER)
            self._say(ask(rng, chat.HAIKU_QUESTIONS, t=topic), chat.HAIKU_ANY.replace("{t}", topic))
        else:
            self._say(ask(rng, chat.HAIKU_PLAIN), chat.HAIKUS["the sea"])

    def _code(self) -> None:
        rng = self.rng
        if rng.random() < 0.1:
            self._say(ask(rng, chat.CODE_ANY), f"```python\n{facts.CODE[0].answer}\n```")
            return
        entry = rng.choice(facts.CODE)
        name = expand(rng.choice(entry.asked), rng)
        is_verb = re.match(r"[a-z]+s\b", name) and name.split()[0] not in {"numbers"} and " " in name
        patterns = chat.CODE_QUESTIONS if is_verb else chat.CODE_NOUN_QUESTIONS
        self._say(ask(rng, patterns, w=name), f"```python\n{entry.answer}\n```")

    def _arithmetic(self) -> None:
        rng = self.rng
        sign, top = rng.choice("+++--**/"), rng.choice([10, 10, 10, 20])
        if rng.random() < 0.1:
            a, b = rng.choice(
                [(rng.randint(21, 9999), rng.randint(2, 9999)), (rng.randint(21, 99), rng.randint(21, 99))]
            )
            answer = chat.BIG_NUMBERS
        elif sign == "+":
            a, b = rng.randint(0, top), rng.randint(0, top)
            answer = f"{a} + {b} = {a + b}"
        elif sign == "-":
            a = rng.randint(0, top)
            b = rng.randint(0, a)
            answer = f"{a} - {b} = {a - b}"
        elif sign == "*":
            a, b = rng.randint(0, 10), rng.randint(0, 10)
            answer = f"{a} * {b} = {a * b}"
        else:
            b, quotient = rng.randint(1, 10), rng.randint(0, 10)
            a = b * quotient
            answer = f"{a} / {b} = {quotient}"
        signs = {"+": ["+", "plus"], "-": ["-", "minus"], "*": ["*", "times", "x"], "/": ["/", "divided by"]}[sign]
        patterns = [
            "[what is|what's|how much is|calculate|compute|solve|] {a} {s} {b}?",
            "{a}{o}{b}",
            "{a} {o} {b} [=|= ?|]",
            "[can you calculate|tell me] {a} {s} {b}?",
        ]
        self._say(ask(rng, patterns, a=str(a), b=str(b), s=rng.choice(signs), o=sign), answer)

    def _count(self) -> None:
        rng = self.rng
        if rng.random() < 0.7:
            n = rng.randint(3, 20)
            self._say(
                ask(rng, [f"count [to|up to|from 1 to|from one to] {n}[| please]."]),
                ", ".join(map(str, range(1, n + 1))),
            )
        else:
            n = rng.randint(3, 10)
            self._say(ask(rng, [f"count [down|backwards] from {n}[| to 1]."]), ", ".join(map(str, range(n, 0, -1))))

    def _json(self) -> None:
        rng = self.rng
        draw = rng.random()
        if draw < 0.12:
            patterns = [
                "[write|show me|give me] [an example of json|a json example|some json|a small json object].",
                "[answer|reply] in json.",
                "can you [write|output] json?",
            ]
            self._say(ask(rng, patterns), '{"name": "Anna", "age": 31, "languages": ["Python", "Rust"]}')
        elif draw < 0.3:
            thing = rng.choice(list(chat.LISTS))
            items = chat.LISTS[thing].split(",")
            n = rng.randint(2, min(5, len(items)))
            patterns = [
                "[give me|write|return|make] [a json|a JSON] [array|list] [of|with] {n} {things}.",
                "[list|name] {n} {things} [as|in] [json|JSON].",
            ]
            self._say(
                ask(rng, patterns, n=chat.NUMBER_WORDS[n], things=chat.PLURALS.get(thing, thing + "s")),
                json.dumps(items[:n]),
            )
        else:
            record: dict[str, object] = {
                "name": self._person(),
                "age": rng.randint(1, 99),
                "city": rng.choice(chat.PLACES),
                "colour": rng.choice(["red", "blue", "green", "black", "white"]),
            }
            keys = rng.choice(
                [
                    ["name", "age"],
                    ["name", "city"],
                    ["name", "age", "city"],
                    ["name", "age", "city"],
                    ["name", "colour"],
                    ["city", "name"],
                    ["name", "age", "colour"],
                ]
            )
            record = {key: record[key] for key in keys}
            parts = [f"{key} {value}" for key, value in record.items()]
            listed = ", ".join(parts[:-1]) + " and " + parts[-1]
            equal = ", ".join(f"{key}{rng.choice(['=', ': ', ' = '])}{value}" for key, value in record.items())
            patterns = [
                f"[give me|write|make|return|create] a [JSON|json] object [with|for|that has] {listed}.",
                f"[convert|turn] this [to|into] [JSON|json]: {equal}",
                f"[JSON|json] for {listed}, please.",
                f"[answer|reply] in [JSON|json]: {listed}.",
                f"write [this |]as [JSON|json]: {equal}",
            ]
            if keys[:2] == ["name", "age"] and len(keys) == 2:
                patterns += [f"extract name and age as [JSON|json]: {record['name']} is {record['age']} years old."] * 2
            self._say(ask(rng, patterns, plain=rng.random() < 0.7), json.dumps(record))

    def _unknown(self) -> None:
        self._ask_entry(facts.OUT_OF_SCOPE[:1])

    def _unable(self) -> None:
        self._ask_entry(facts.OUT_OF_SCOPE[1:])

    def _repeat(self) -> None:
        known = [*chat.OPPOSITES, *chat.HAIKU_OTHER, *chat.PLACES]
        count = self.rng.randint(1, 4)
        words = " ".join(self.rng.choice([self.rng.choice(known), self._person()]) for _ in range(count))
        self._say(
            ask(
                self.rng,
                ["[repeat|say|write|echo]: {w}", "repeat after me: {w}", '[say|repeat] "{w}"'],
                plain=True,
                w=words,
            ),
            words,
        )

    def _person(self) -> str:
        """Return a common name, or sometimes an invented one, so that the model learns to copy."""
        rng = self.rng
        if rng.random() < 0.55:
            return rng.choice(chat.PEOPLE)
        return "".join(
            rng.choice("bcdfghklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(2, 3))
        ).capitalize()

    def _name(self) -> None:
        rng = self.rng
        question = ["[what is|what's|do you know|do you remember|tell me] my name?", "what am i called?", "who am i?"]
        if self.user_name is None and rng.random() < 0.75:
            name = self._person()
            hello = [
                "my name is {n}[.|]",
                "[i am|i'm] {n}[.|]",
                "[hi|hello|hey][,|!] [my name is|i am|i'm] {n}[.|]",
                "call me {n}[.|]",
                "you can call me {n}[.|]",
            ]
            user = ask(rng, hello, plain=True, n=name)
            self._say(
                user[0].upper() + user[1:] if rng.random() < 0.7 else user,
                f"Nice to meet you, {name}! What would you like to know?",
            )
            self.user_name = name
            if rng.random() < 0.5:
                rng.choice([self._term, self._capital, self._arithmetic, self._small_talk, self._little_fact])()
            if rng.random() < 0.7:
                self._say(ask(rng, question), f"Your name is {name}.")
        else:
            self._say(ask(rng, question), f"Your name is {self.user_name}." if self.user_name else chat.NAME_UNKNOWN)


TOOLS = [
    (["get_weather", "get_current_weather", "weather", "lookup_weather"], ["city", "location", "place"], "Get the weather of a city",
     ["[what is|how is|what's|how's] the weather [like |]in {v}[| today| now]?", "weather in {v}[| please]?", "is it [cold|warm|raining|sunny] in {v}?", "what is the temperature in {v}?"], "place"),
    (["get_time", "current_time", "time_in_city"], ["city", "location", "timezone"], "Get the current time in a city",
     ["what time is it in {v}?", "[tell me|what is] the time in {v}.", "time in {v}?"], "place"),
    (["search", "web_search", "search_web"], ["query", "q", "text"], "Search the web",
     ["search [the web |online |]for {v}.", "[look up|google|find] {v}[| online| on the web].", "[find|get] information about {v}."], "topic"),
    (["send_email", "send_message", "write_message"], ["to", "recipient", "person"], "Send a message to a person",
     ["send [a message|an email|a mail] to {v}.", "[write|text|message] {v}[| for me].", "[send|write] {v} a message."], "person"),
    (["turn_on_light", "light_on", "switch_light"], ["room", "place", "name"], "Turn on the light in a room",
     ["[turn|switch] on the light in the {v}.", "light on in the {v}[| please].", "make it bright in the {v}."], "room"),
]  # fmt: skip
ROOMS = ["kitchen", "bedroom", "bathroom", "office", "garden", "garage", "hall", "cellar"]
SKIES = ["sunny", "cloudy", "rainy", "windy", "snowy"]


def tool_conversation(rng: random.Random) -> tuple[list[Message], list[dict[str, Any]]]:
    """Return a chat with functions: a call, its result and the model's answer to it, or a plain answer."""
    chosen = rng.sample(TOOLS, rng.randint(1, 2))
    tools, named = [], []
    for names, arguments, description, patterns, kind in chosen:
        name, argument = rng.choice(names), rng.choice(arguments)
        schema = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
        function = (
            {"name": name, "description": description, "parameters": schema}
            if rng.random() < 0.85
            else {"name": name, "parameters": schema}
        )
        tools.append({"type": "function", "function": function})
        named.append((name, argument, patterns, kind))
    writer = Writer(rng)
    if rng.random() < 0.3:
        writer.messages.append({"role": "system", "content": rng.choice(chat.SYSTEM_PROMPTS)})
    if rng.random() < 0.25:
        rng.choice([writer._term, writer._small_talk, writer._question, writer._arithmetic])()
        return writer.messages, tools
    name, argument, patterns, kind = rng.choice(named)
    value = {
        "place": rng.choice([*chat.PLACES, *chat.CAPITALS.values()]),
        "topic": rng.choice([*chat.HAIKU_OTHER, *chat.CAPITALS]),
        "person": writer._person(),
        "room": rng.choice(ROOMS),
    }[kind]
    user = ask(rng, patterns, plain=True, v=value)
    user = user[0].upper() + user[1:] if rng.random() < 0.7 else user
    call = {"type": "function", "function": {"name": name, "arguments": {argument: value}}}
    writer.messages += [{"role": "user", "content": user}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    if rng.random() < 0.6:
        degrees, hour, sky = rng.randint(-9, 35), f"{rng.randint(0, 23)}:{rng.randint(10, 59)}", rng.choice(SKIES)
        if "weather" in name:
            result, answer = (
                json.dumps({"temperature": degrees, "sky": sky}),
                f"It is {sky} in {value}, with {degrees} degrees.",
            )
        elif "time" in name:
            result, answer = json.dumps({"time": hour}), f"It is {hour} in {value}."
        elif "search" in name:
            result, answer = json.dumps({"results": degrees + 10}), f"I found {degrees + 10} results for {value}."
        elif kind == "person":
            result, answer = (
                rng.choice(["ok", '{"status": "sent"}', '{"ok": true}']),
                f"The message to {value} was sent.",
            )
        else:
            result, answer = rng.choice(["ok", '{"status": "on"}', '{"ok": true}']), f"The light in the {value} is on."
        writer.messages += [{"role": "tool", "content": result}, {"role": "assistant", "content": answer}]
    return writer.messages, tools


def conversations(seed: int) -> Iterator[tuple[list[Message], list[dict[str, Any]] | None]]:
    """Yield endless (messages, tools) pairs; the same seed gives the same stream."""
    rng = random.Random(seed)
    while True:
        if rng.random() < 0.06:
            yield tool_conversation(rng)
        else:
            yield Writer(rng).conversation(), None


TOOLS_HEAD = "You can call these functions:\n<tools>\n"
TOOLS_TAIL = '</tools>\nTo call one, answer with:\n<tool_call>\n{"name": NAME, "arguments": ARGUMENTS}\n</tool_call>'


def render(messages: list[Message], tools: list[dict[str, Any]] | None = None) -> list[tuple[str, bool]]:
    """Apply tokenizer.json's chat template in Python; return (text, is it written by the assistant) pieces."""
    pieces: list[tuple[str, bool]] = []
    if tools:
        head = ""
        if messages[0]["role"] == "system":
            head, messages = messages[0]["content"] + "\n\n", messages[1:]
        listed = "".join(json.dumps(tool, ensure_ascii=False) + "\n" for tool in tools)
        pieces.append((f"<|im_start|>system\n{head}{TOOLS_HEAD}{listed}{TOOLS_TAIL}<|im_end|>\n", False))
    for message in messages:
        text = message["content"]
        for call in message.get("tool_calls", []):
            text += "<tool_call>\n" + json.dumps(call["function"], ensure_ascii=False) + "\n</tool_call>"
        is_answer = message["role"] == "assistant"
        pieces += [(f"<|im_start|>{message['role']}\n", False), (f"{text}<|im_end|>", is_answer), ("\n", False)]
    return pieces
