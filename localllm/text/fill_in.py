"""Prompts for filling in the middle: the text before a gap, the text behind it, and the markers between them.

Each family of code models was trained with tokens of its own. They are found by the roles that a checkpoint or a GGUF
file gives its tokens, or by their names in the vocabulary.

    prefix first   PREFIX before SUFFIX behind MIDDLE       Qwen, DeepSeek, StarCoder, CodeLlama, Granite, CodeGemma
    suffix first   SUFFIX behind PREFIX before              Codestral and other models of Mistral

Idea: Bavarian et al. 2022, arXiv:2207.14255.
Does not know: requests, models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from localllm.text.grammar import ids_inside_text
from localllm.text.tokenizer import Tokenizer


class _Family(NamedTuple):
    """The names of a family's tokens."""

    prefix: str
    suffix: str
    middle: str = ""  # empty: the suffix comes first, and the answer follows the prefix
    file: tuple[str, ...] = ()  # before the name of each file
    repo: tuple[str, ...] = ()  # before the name of the repository
    ends: tuple[str, ...] = ()  # tokens that end the answer, beside the model's own


_BARS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
FAMILIES = (
    _Family(*_BARS, ("<|file_sep|>", "<|file_separator|>"), ("<|repo_name|>",), ("<|fim_pad|>", "<|endoftext|>")),
    _Family(
        "<fim_prefix>",
        "<fim_suffix>",
        "<fim_middle>",
        ("<file_sep>", "<filename>"),
        ("<repo_name>", "<reponame>"),
        ("<fim_pad>", "<|endoftext|>"),
    ),
    _Family("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    _Family("▁<PRE>", "▁<SUF>", "▁<MID>", ends=("▁<EOT>",)),
    _Family("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    _Family("[PREFIX]", "[SUFFIX]"),
)
"""Qwen, CodeGemma and Granite 4; StarCoder and Granite Code; DeepSeek; CodeLlama; GLM 4; Mistral."""
_ROLES = (
    ("fim_pre_token", "fim_suf_token", "fim_mid_token"),  # of GGUF files
    ("prefix_token", "suffix_token", "middle_token"),  # of older ones, and of CodeLlama's checkpoints
)
REPOSITORY = "myproject"  # as llama.cpp names it to the model
FILE = "filename"


@dataclass(frozen=True, slots=True)
class ExtraFile:
    """Another file that the model may look at."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class FillIn:
    """The tokens of one model for filling in the middle."""

    tokenizer: Tokenizer
    prefix_id: int
    suffix_id: int
    middle_id: int | None  # None: the suffix comes first
    file_id: int | None = None
    repo_id: int | None = None
    end_ids: tuple[int, ...] = ()  # tokens that end the answer

    def prompt(self, before: str, behind: str, extra: Sequence[ExtraFile] = (), room: int | None = None) -> list[int]:
        """Return the token ids. room: most of them; what is farthest from the gap is left out, of the text behind the
        gap all but a quarter of the room; None: nothing is left out."""
        prefix = self.tokenizer.encode(before, add_special_tokens=False)
        suffix = ids_inside_text(self.tokenizer, behind)
        head, files = self._head(), self._files(extra) if extra else []
        if room is not None:
            left = max(2, room - len(head) - 3)
            suffix = suffix[: max(left // 4, left - len(prefix))]
            prefix = prefix[max(0, len(prefix) - (left - len(suffix))) :]
            files = files[max(0, len(files) - (left - len(suffix) - len(prefix))) :]
        if self.middle_id is None:
            return [*head, *files, self.suffix_id, *suffix, self.prefix_id, *prefix]
        return [*head, *files, self.prefix_id, *prefix, self.suffix_id, *suffix, self.middle_id]

    def _head(self) -> list[int]:
        """Return the token that begins every text, if the tokenizer writes one."""
        begun = self.tokenizer.encode("", add_special_tokens=True)[:1]
        return begun if begun == [self.tokenizer.bos_token_id] else []

    def _files(self, extra: Sequence[ExtraFile]) -> list[int]:
        """Return the other files, as llama.cpp writes them."""
        token_ids = [] if self.repo_id is None else [self.repo_id, *self._inside(f"{REPOSITORY}\n")]
        for file in extra:
            begin = [] if self.file_id is None else [self.file_id]
            name = f"{file.name}\n" if begin else "\n\n--- snippet ---\n\n"
            token_ids += [*begin, *self._inside(f"{name}{file.text}")]
        return token_ids if self.file_id is None else [*token_ids, self.file_id, *self._inside(f"{FILE}\n")]

    def _inside(self, text: str) -> list[int]:
        return ids_inside_text(self.tokenizer, text)


def find_fill_in(tokenizer: Tokenizer) -> FillIn | None:
    """Return the tokens of this model; None if its vocabulary has none."""

    def first(*names: str) -> int | None:
        return next((found for name in names if name and (found := tokenizer.token_id(name)) is not None), None)

    named = tokenizer.special_tokens
    for roles in _ROLES:
        prefix, suffix, middle = (first(named.get(role, "")) for role in roles)
        if prefix is not None and suffix is not None and middle is not None:
            file, repo = first(named.get("fim_sep_token", "")), first(named.get("fim_rep_token", ""))
            others = (first(named.get(role, "")) for role in ("fim_pad_token", "eot_token"))
            ends = tuple(dict.fromkeys(i for i in (*others, file, repo) if i is not None))
            return FillIn(tokenizer, prefix, suffix, middle, file, repo, ends)
    for family in FAMILIES:
        prefix, suffix, middle = first(family.prefix), first(family.suffix), first(family.middle)
        if prefix is None or suffix is None or (family.middle and middle is None):
            continue
        file, repo = first(*family.file), first(*family.repo)
        ends = tuple(dict.fromkeys(i for i in (*map(first, family.ends), file, repo) if i is not None))
        return FillIn(tokenizer, prefix, suffix, middle, file, repo, ends)
    return None
