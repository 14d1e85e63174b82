"""A conversation at the terminal: typed text becomes messages, and answers are printed as they arrive.

`run` talks to a model in this process, `chat` and `complete` talk to a server; each provides a `Speaker`. Answers go to
standard output, everything else to standard error, so that `localllm run demo < question.txt > answer.txt` writes only
the answer.
Does not know: which model answers.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TextIO

from localllm.engine.params import SAMPLING_PARAMS, ParamInfo
from localllm.errors import ConfigError, LocalLLMError
from localllm.units import format_rate, format_seconds

HELP = '''\
/clear         delete the conversation, except its system message
/system TEXT   set the system message; without TEXT: none
/model NAME    switch to another model; without NAME: list the models
/regen         regenerate the last answer
/save FILE     write the conversation to FILE: JSON if it ends in .json, Markdown otherwise
/exit          leave, like Ctrl-D
Ctrl-C stops an answer. A line that ends in \\ continues on the next; """ begins and ends a text of several lines.'''

CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""Control codes, removed so that a text cannot move the cursor or rename the window."""
SAMPLING = ("temperature", "top_p", "top_k", "max_tokens", "stop")
"""The sampling parameters that have a flag."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer."""

    text: str
    is_reasoning: bool = False


class Speaker(Protocol):
    """The model or server that answers."""

    @property
    def model(self) -> str: ...

    @property
    def continues_text(self) -> bool:
        """Return whether only the last text is continued, without a chat template and without earlier messages."""

    def answer(self, messages: Sequence[dict[str, str]]) -> Generator[Piece]:
        """Yield the answer to a conversation in pieces. Closing the generator cancels it; raises `LocalLLMError`."""

    def figures(self) -> str:
        """Return one line with the token counts and speed of the last answer."""

    def models(self) -> Sequence[str]:
        """Return the names that `use` accepts."""

    def use(self, name: str) -> None:
        """Switch to another model. Raises `LocalLLMError`."""


class Talk:
    """A conversation: its messages, and the commands that change or continue it."""

    def __init__(self, speaker: Speaker, *, system: str | None = None, verbose: bool = False) -> None:
        self.speaker, self.messages = speaker, list[dict[str, str]]()
        self._verbose = verbose
        self._written: set[Path] = set()
        self.instruct(system)

    def clear(self) -> None:
        """Delete all messages except the system message."""
        self.messages = [message for message in self.messages if message["role"] == "system"]

    def instruct(self, system: str | None) -> None:
        """Set the system message; the conversation stays. Raises `ConfigError` if system messages are not supported."""
        if system and self.speaker.continues_text:
            why = "The text is continued as it is, without a chat template."
            raise ConfigError("A system message is not supported here.", why)
        rest = [message for message in self.messages if message["role"] != "system"]
        self.messages = [{"role": "system", "content": system}, *rest] if system else rest

    def say(self, text: str) -> None:
        """Print the answer as it arrives and add both messages. A message without an answer is dropped."""
        before = list(self.messages)
        self.messages.append({"role": "user", "content": text})
        self._answer(before)

    def again(self) -> None:
        """Replace the last answer by a new one. Raises `ConfigError` if there is no answer yet."""
        before = list(self.messages)
        if not before or before[-1]["role"] != "assistant":
            raise ConfigError("There is no answer to regenerate yet.")
        self.messages.pop()
        self._answer(before)

    def _answer(self, before: list[dict[str, str]]) -> None:
        """Print and add an answer. `before`: the messages to restore if there is no answer."""
        page, said = _Page(), list[str]()
        try:
            with closing(self.speaker.answer(self.messages)) as pieces:
                for piece in pieces:
                    page.write(piece)
                    if not piece.is_reasoning:
                        said.append(piece.text)
        except LocalLLMError:
            self.messages = before
            raise
        except KeyboardInterrupt:
            self._remember("".join(said), before)
            raise
        finally:
            page.end()
        self.messages.append({"role": "assistant", "content": "".join(said)})
        if self._verbose:
            print(self.speaker.figures(), file=sys.stderr)

    def _remember(self, stopped: str, before: list[dict[str, str]]) -> None:
        if stopped:
            self.messages.append({"role": "assistant", "content": stopped})
        else:
            self.messages = before

    def save(self, path: Path) -> None:
        """Write the conversation to a file. Raises `ConfigError` for a file that existed before this chat."""
        if path.exists() and path not in self._written:
            raise ConfigError(f"{path} already exists.", "It was not written by this chat.", "another name")
        if path.suffix == ".json":
            text = json.dumps({"model": self.speaker.model, "messages": self.messages}, indent=2, ensure_ascii=False)
        else:
            text = "\n\n".join(f"## {message['role']}\n\n{message['content']}" for message in self.messages)
        try:
            path.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"Cannot write {path}.", f"{error.strerror or error}.") from error
        self._written.add(path)


class _Page:
    """The output of one answer: reasoning goes to standard error, dimmed; at a terminal, control codes are removed."""

    def __init__(self) -> None:
        self._dims = sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._reasons = False
        self._out: TextIO | None = None  # stream of the last piece

    def write(self, piece: Piece) -> None:
        if self._reasons and not piece.is_reasoning:
            print("\n", file=sys.stderr, flush=True)
        self._reasons = piece.is_reasoning
        out = self._out = sys.stderr if piece.is_reasoning else sys.stdout
        text = piece.text.translate(CONTROLS) if out.isatty() else piece.text
        print(f"\x1b[2m{text}\x1b[0m" if piece.is_reasoning and self._dims else text, end="", file=out, flush=True)

    def end(self) -> None:
        if self._out is not None:
            print(file=self._out, flush=True)


def answer_or_chat(talk: Talk, prompt: str | None) -> int:
    """Answer the prompt; without a prompt, chat."""
    if prompt is not None:
        talk.say(prompt)
        return 0
    return chat(talk)


def chat(talk: Talk) -> int:
    """Read and answer messages until Ctrl-D. Ctrl-C ends an answer, or drops the typed line."""
    import readline  # noqa: F401  arrow keys and history in input()

    print(f"Chat with {talk.speaker.model}. /help lists the commands, Ctrl-D leaves.", file=sys.stderr)
    while True:
        try:
            text, is_command = _read()
        except EOFError:
            print(file=sys.stderr)
            return 0
        except KeyboardInterrupt:
            print("\n(Ctrl-D leaves)", file=sys.stderr)
            continue
        if is_command and text.split()[0] in ("/exit", "/bye"):
            return 0
        if text:
            _do(talk, text, is_command)


def _read() -> tuple[str, bool]:
    """Read one message of one or several lines. Return it, and whether it is a command; a quoted text is not."""
    line = input(">>> ").strip()
    if line.startswith('"""'):
        text = line[3:]
        while not text.rstrip().endswith('"""'):
            text += "\n" + input("... ")
        return text.rstrip()[:-3].strip("\n"), False
    while line.endswith("\\"):
        line = line[:-1] + "\n" + input("... ").rstrip()
    return line, line.startswith("/")


def _do(talk: Talk, text: str, is_command: bool) -> None:
    """Run one message or command. Errors are printed and do not end the chat."""
    try:
        if is_command:
            command, _, rest = text.partition(" ")
            _obey(talk, command, rest.strip())
        else:
            talk.say(text)
    except KeyboardInterrupt:
        print("(stopped)", file=sys.stderr)
    except LocalLLMError as error:
        print(error, file=sys.stderr)
        if error.hint:
            print(f"Try: {error.hint}", file=sys.stderr)


def _obey(talk: Talk, command: str, rest: str) -> None:
    told = ""
    if command == "/clear":
        talk.clear()
    elif command == "/system":
        talk.instruct(rest)
    elif command == "/model" and rest:
        talk.speaker.use(rest)
        told = f"Switched to {talk.speaker.model}."
    elif command == "/model":
        told = "\n".join(f"{'*' if name == talk.speaker.model else ' '} {name}" for name in talk.speaker.models())
    elif command == "/regen":
        talk.again()
    elif command == "/save" and rest:
        talk.save(Path(rest).expanduser())
        told = f"Saved to {rest}."
    elif command == "/help":
        told = HELP
    else:
        raise ConfigError(f"{command} needs a FILE." if command == "/save" else f"Unknown command {command}.", "/help")
    if told:
        print(told, file=sys.stderr)


def add_sampling(parser: argparse.ArgumentParser, *, chats: bool = True) -> argparse._ArgumentGroup:
    """Add the sampling flags of the verbs that print answers. Return their group."""
    sampling = parser.add_argument_group("sampling")
    if chats:
        sampling.add_argument("--system", metavar="TEXT", help="system message")
    else:
        parser.set_defaults(system=None)
    for name in SAMPLING:
        _add_sampling_flag(sampling, name, SAMPLING_PARAMS[name], chats)
    parser.add_argument("--verbose", action="store_true", help="print token counts and speed after each answer")
    return sampling


def _add_sampling_flag(sampling: argparse._ArgumentGroup, name: str, info: ParamInfo, chats: bool) -> None:
    flag, help = f"--{name.replace('_', '-')}", info.text[0].lower() + info.text[1:].removesuffix(".")
    if name == "max_tokens":
        help += f"; default: {info.unset if chats else '256'}"
    if info.kind == "strings":
        sampling.add_argument(flag, action="append", metavar="TEXT", help=help)
    else:
        number, metavar = (float, "X") if info.kind == "real" else (int, "N")
        sampling.add_argument(flag, type=number, metavar=metavar, help=help)


def read_prompt(words: str | None) -> str | None:
    """Return the prompt of the command line followed by piped input; None at a terminal without a prompt."""
    piped = "" if sys.stdin.isatty() else sys.stdin.read().strip()
    parts = [part for part in (words, piped) if part]
    if not parts and not sys.stdin.isatty():
        raise ConfigError("The prompt is empty.", "Standard input is empty.", "a prompt in quotes")
    return "\n\n".join(parts) if parts else None


def speed_line(
    prompt: int, cached: int, output: int, *, ttft_s: float, decode_s: float, finish_reason: str | None
) -> str:
    """Format an answer's token counts, its time to first token and its speed after that."""
    rate = format_rate((output - 1) / decode_s) if decode_s > 0 and output > 1 else "-"
    known = f" ({cached} cached)" if cached else ""
    return f"prompt {prompt}{known} · output {output} · first token {format_seconds(ttft_s)} · {rate} · {finish_reason}"
