"""Prompts for filling in the middle, as each family's model card writes them."""

from collections.abc import Sequence

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from localllm.text.fill_in import ExtraFile, FillIn, find_fill_in
from localllm.text.tokenizer import Tokenizer

BEFORE, BEHIND = "def f(x):\n    return ", "\n\nf(1)\n"
FILES = (ExtraFile("a.py", "A = 1"), ExtraFile("b.py", "B = 2"))


def tokenizer_with(tokens: Sequence[str], bos: str = "", roles: dict[str, str] | None = None) -> Tokenizer:
    """A token for each byte, and the family's own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    raw.add_special_tokens([*tokens, *([bos] if bos else [])])
    if bos:
        raw.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, raw.token_to_id(bos))]
        )
    return Tokenizer(raw, special_tokens={**({"bos_token": bos} if bos else {}), **(roles or {})})


def found(tokenizer: Tokenizer) -> FillIn:
    fill_in = find_fill_in(tokenizer)
    assert fill_in is not None
    return fill_in


def written(fill_in: FillIn, *extra: ExtraFile) -> str:
    return fill_in.tokenizer.decode(fill_in.prompt(BEFORE, BEHIND, extra), skip_special_tokens=False)


BARS = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
ANGLES = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"]
CASES: list[tuple[str, Sequence[str], str, str, Sequence[str]]] = [
    ("qwen2.5-coder", [*BARS, "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|endoftext|>"], "",
     f"<|fim_prefix|>{BEFORE}<|fim_suffix|>{BEHIND}<|fim_middle|>",
     ["<|fim_pad|>", "<|endoftext|>", "<|file_sep|>", "<|repo_name|>"]),
    ("deepseek-coder", ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"], "<｜begin▁of▁sentence｜>",
     f"<｜begin▁of▁sentence｜><｜fim▁begin｜>{BEFORE}<｜fim▁hole｜>{BEHIND}<｜fim▁end｜>", []),
    ("starcoder2", [*ANGLES, "<fim_pad>", "<repo_name>", "<file_sep>", "<|endoftext|>"], "",
     f"<fim_prefix>{BEFORE}<fim_suffix>{BEHIND}<fim_middle>",
     ["<fim_pad>", "<|endoftext|>", "<file_sep>", "<repo_name>"]),
    ("codellama", ["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"], "<s>",
     f"<s>▁<PRE>{BEFORE}▁<SUF>{BEHIND}▁<MID>", ["▁<EOT>"]),
    ("codestral", ["[PREFIX]", "[SUFFIX]", "[MIDDLE]"], "<s>", f"<s>[SUFFIX]{BEHIND}[PREFIX]{BEFORE}", []),
    ("granite-code", [*ANGLES, "<fim_pad>", "<filename>", "<reponame>", "<|endoftext|>"], "",
     f"<fim_prefix>{BEFORE}<fim_suffix>{BEHIND}<fim_middle>",
     ["<fim_pad>", "<|endoftext|>", "<filename>", "<reponame>"]),
    ("codegemma", [*BARS, "<|file_separator|>"], "<bos>",
     f"<bos><|fim_prefix|>{BEFORE}<|fim_suffix|>{BEHIND}<|fim_middle|>", ["<|file_separator|>"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "tokens", "bos", "prompt", "ends"), CASES, ids=[case[0] for case in CASES])
def test_each_family_has_its_prompt(
    name: str, tokens: Sequence[str], bos: str, prompt: str, ends: Sequence[str]
) -> None:
    fill_in = found(tokenizer_with(tokens, bos))
    assert written(fill_in) == prompt
    assert [fill_in.tokenizer.token_text(token_id) for token_id in fill_in.end_ids] == list(ends)


def test_the_roles_of_a_file_come_before_names() -> None:
    roles = {"fim_pre_token": "<P>", "fim_suf_token": "<S>", "fim_mid_token": "<M>", "fim_pad_token": "<E>"}
    fill_in = found(tokenizer_with(["<P>", "<S>", "<M>", "<E>", *BARS], roles=roles))
    assert written(fill_in) == f"<P>{BEFORE}<S>{BEHIND}<M>"
    assert fill_in.end_ids == (fill_in.tokenizer.token_id("<E>"),)


def test_a_vocabulary_without_markers_has_none() -> None:
    assert find_fill_in(tokenizer_with(["<fim_prefix>", "<think>"])) is None


def test_other_files_come_first_as_llama_cpp_writes_them() -> None:
    _, tokens, bos, prompt, _ = CASES[0]
    expected = f"<|repo_name|>myproject\n<|file_sep|>a.py\nA = 1<|file_sep|>b.py\nB = 2<|file_sep|>filename\n{prompt}"
    assert written(found(tokenizer_with(tokens, bos)), *FILES) == expected
    _, tokens, bos, prompt, _ = CASES[1]
    snippets = "\n\n--- snippet ---\n\nA = 1\n\n--- snippet ---\n\nB = 2"
    assert written(found(tokenizer_with(tokens, bos)), *FILES) == f"{bos}{snippets}{prompt.removeprefix(bos)}"


@pytest.mark.parametrize("room", [20, 40, 60, 100, 1000])
def test_what_is_farthest_from_the_gap_is_left_out(room: int) -> None:
    _, tokens, bos, _, _ = CASES[0]
    fill_in = found(tokenizer_with(tokens, bos))
    before, behind = "b" * 60 + "|", "|" + "a" * 60
    token_ids = fill_in.prompt(before, behind, FILES, room)
    assert len(token_ids) <= room
    text = fill_in.tokenizer.decode(token_ids, skip_special_tokens=False)
    assert "|<|fim_suffix|>|" in text
    kept = text.partition("<|fim_prefix|>")[2]
    assert kept.count("b") > kept.count("a") or room >= 130
    assert (room < 1000) or text == fill_in.tokenizer.decode(
        fill_in.prompt(before, behind, FILES), skip_special_tokens=False
    )
