"""Read the demo model's knowledge from the .txt files in this folder.

terms.txt        a line `@ name` for each name of a term, `! answer`, `+ answer to "tell me more"`
the other files  a line `? pattern` for each way to ask, then `! answer`, which may span several lines

In a pattern `[a|b|]` means: choose one. Each meaning has one answer, because a very small model decodes best when it
never has to choose a style.
Does not know: how patterns become conversations (corpus.py).
"""

from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


@dataclass(slots=True)
class Entry:
    """One meaning: ways to ask for it, the model's answer, and its answer to "tell me more"."""

    asked: list[str] = field(default_factory=list)
    answer: str = ""
    more: str = ""


def read(name: str) -> list[Entry]:
    """Return the entries of a file, in order."""
    entries: list[Entry] = []
    part = ""
    for line in (FOLDER / name).read_text(encoding="utf-8").splitlines():
        mark, text = line[:2], line[2:]
        if mark in ("? ", "@ "):
            if part != "asked":
                entries.append(Entry())
            part = "asked"
            entries[-1].asked.append(text)
        elif mark == "! ":
            part = "answer"
            entries[-1].answer = text
        elif mark == "+ ":
            part = "more"
            entries[-1].more = text
        elif part == "answer":
            entries[-1].answer += "\n" + line
    for entry in entries:
        entry.answer = entry.answer.rstrip("\n")
    return entries


TERMS = read("terms.txt")
QUESTIONS = read("questions.txt")
SMALL_TALK = read("small_talk.txt")
LITTLE_FACTS = read("little_facts.txt")
CODE = read("code.txt")
OUT_OF_SCOPE = read("out_of_scope.txt")

WHAT = [
    "[what is|what's|whats|what are|what does it mean:] {t}?",
    "what is {t} [in localllm|in an LLM server|exactly|about|in simple words|for a language model]?",
    "[explain|describe|define] {t}[| to me| briefly| in simple terms| in one paragraph| in a few words].",
    "[can|could] you [explain|describe] {t}[| to me| please| briefly]?",
    "how does {t} work[| exactly| in localllm| here]?",
    "[tell me|teach me] [something |a bit |more |]about {t}.",
    "[i do not|i don't] [understand|get|know] {t}.",
    "what do you know about {t}?",
    "what does {t} mean?",
    "what does {t} do[| in localllm| for me]?",
    "[why is|why do we need|why use|why does localllm use] {t}[| useful| important]?",
    "[what is the idea|what is the point|what is the purpose|what is the benefit] [of|behind] {t}?",
    "[give me|i need|i would like] [a short|an|a quick] [explanation|summary|description] of {t}.",
    "{t}?",
    "[what is|what's] {t} [good for|used for|for|there for]?",
    "[do you know|can you tell me|could you tell me|please tell me] what {t} [is|are|means|does]?",
    "[help me understand|help me with|talk about|say something about|teach me] {t}.",
    "[why does|how does] {t} [matter|help|help me]?",
    "[when do i need|how is|where is|what are the advantages of] {t}[| used]?",
    "i [have a question about|want to learn about|want to know more about|want to understand|am reading about] {t}.",
    "[what's the deal with|what about|and|so,] {t}?",
    "how would you [explain|describe] {t} to [a beginner|a child|a friend|me|my boss]?",
    "[what can you tell me|what should i know] about {t}?",
    "give me an overview of {t}.",
    "[what exactly is|what on earth is|remind me what is] {t}?",
    "what is meant by {t}?",
    "[i read about|i heard about|the dashboard mentions] {t}. [what is it|what is that|what does it mean]?",
]
