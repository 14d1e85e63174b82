"""I26: deltas add up to the decoded output, no part of a stop string leaks, text, ids and logprobs agree."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.text.cursor import TextCursor, TextDelta
from localllm.text.tokenizer import Tokenizer
from tests.draws import draws
from tests.text.vocabularies import BYTE_RULE_KINDS, CORPUS, UNSEEN, tokenizer

Kind = st.sampled_from(BYTE_RULE_KINDS)
MORE = draws(200)


@st.composite
def token_ids(draw: st.DrawFn, kind: str, max_size: int = 40) -> list[int]:
    """Random ids, real text, and single bytes, in any mixture; some ids are outside the vocabulary."""
    tok = tokenizer(kind)
    anything = st.integers(0, tok.vocab_size + 2).map(lambda i: [i])
    byte_ids = [i for i in range(tok.vocab_size) if len(tok.token_bytes(i)) == 1 and tok.token_bytes(i) >= b"\x80"]
    some_byte = st.sampled_from(byte_ids or [0]).map(lambda i: [i])
    text = st.text(max_size=6).map(tok.encode) | st.sampled_from([tok.encode(t) for t in (*CORPUS, UNSEEN)])
    pieces = draw(st.lists(anything | some_byte | text, max_size=12))
    return [i for piece in pieces for i in piece][:max_size]


def run(cursor: TextCursor, ids: Sequence[int], cuts: Sequence[int] = (), **last: Any) -> list[TextDelta]:
    """Push the ids in groups that end at `cuts` (one by one without), logprobs 'lp0', 'lp1', ... beside them."""
    bounds = sorted({*cuts, len(ids)}) if cuts else range(1, len(ids) + 1)
    deltas, start = [], 0
    for end in bounds:
        deltas.append(cursor.push(ids[start:end], [f"lp{i}" for i in range(start, end)]))
        start = end
    return [*deltas, cursor.finish(**last)]


def joined(deltas: Sequence[TextDelta]) -> tuple[str, list[int], list[Any], str | None]:
    stops = [d.stop_string for d in deltas if d.stop_string is not None]
    assert len(stops) <= 1
    return (
        "".join(d.text for d in deltas),
        [i for d in deltas for i in d.token_ids],
        [lp for d in deltas for lp in d.logprobs],
        stops[0] if stops else None,
    )


def complete_text(tok: Tokenizer, ids: Sequence[int], skip: bool = True) -> str:
    """The characters that are complete after these ids (an open one at the end is not shown yet)."""
    stream = tok.stream((), skip_special_tokens=skip)
    return "".join(stream.feed(i) for i in ids)


@MORE
@given(st.data(), Kind, st.booleans())
def test_deltas_add_up_to_the_decoded_output(data: st.DataObject, kind: str, skip: bool) -> None:
    tok, ids = tokenizer(kind), data.draw(token_ids(kind))
    cursor = TextCursor(tok, [], skip_special_tokens=skip)
    text, out, logprobs, _ = joined(run(cursor, ids))
    assert text == tok.decode(ids, skip_special_tokens=skip)
    assert out == ids
    assert logprobs == [f"lp{i}" for i in range(len(ids))]
    assert cursor.num_tokens == len(ids)


@MORE
@given(st.data(), Kind)
def test_output_continues_the_prompt(data: st.DataObject, kind: str) -> None:
    tok = tokenizer(kind)
    prompt, ids = data.draw(token_ids(kind)), data.draw(token_ids(kind))
    text = joined(run(TextCursor(tok, prompt), ids))[0]
    before, whole = tok.decode(prompt[-8:]), tok.decode([*prompt[-8:], *ids])
    if not before.endswith("�"):
        assert text == whole[len(before) :]
    else:  # the prompt ends inside a character: the output shows it whole, or not at all
        assert text in (whole[len(before) :], whole[len(before) - 1 :], tok.decode(ids))


@MORE
@given(st.data(), Kind)
def test_each_delta_is_the_text_of_its_tokens(data: st.DataObject, kind: str) -> None:
    tok, ids = tokenizer(kind), data.draw(token_ids(kind))
    cursor, text, out = TextCursor(tok, []), "", 0
    for i in ids:
        delta = cursor.push([i])
        text, out = text + delta.text, out + len(delta.token_ids)
        assert text == complete_text(tok, ids[:out])
        open_character = tok.decode(ids[: cursor.num_tokens]) != complete_text(tok, ids[: cursor.num_tokens])
        assert (out == cursor.num_tokens) != open_character, "released as soon as the character is complete"


@st.composite
def stop_cases(draw: st.DrawFn) -> tuple[str, list[int], list[str], int, list[int]]:
    """Stop strings are pieces of the very text, so that they begin, fail and complete often."""
    kind = draw(Kind)
    ids = draw(token_ids(kind))
    text = tokenizer(kind).decode(ids)
    spans = st.tuples(st.integers(0, len(text)), st.integers(1, 6)).map(lambda s: text[s[0] : s[0] + s[1]])
    stops = [s for s in draw(st.lists(spans | st.sampled_from(["###", "\n", "</s>", "�"]), max_size=4)) if s]
    stops += draw(st.lists(st.sampled_from([s + "x" for s in stops] or ["x"]), max_size=1))
    cuts = draw(st.lists(st.integers(1, max(1, len(ids) - 1)), max_size=8)) if len(ids) > 1 else []
    return kind, ids, stops, draw(st.integers(0, 6)), cuts


def expected_stop(tok: Tokenizer, ids: Sequence[int], stops: Sequence[str], min_tokens: int) -> tuple[str, str | None]:
    """By brute force: the first character at which a match completes with a token beyond min_tokens."""
    seen = 0
    for count in range(1, len(ids) + 2):
        text = complete_text(tok, ids[:count]) if count <= len(ids) else tok.decode(ids)
        for end in range(seen + 1, len(text) + 1):
            ending = [s for s in stops if text[:end].endswith(s)]
            if ending and min(count, len(ids)) > min_tokens:
                longest = max(ending, key=len)
                return text[: end - len(longest)], longest
        seen = len(text)
    return tok.decode(ids), None


@draws(400)
@given(stop_cases())
def test_text_ends_where_the_first_stop_string_completes(
    case: tuple[str, list[int], list[str], int, list[int]],
) -> None:
    kind, ids, stops, min_tokens, cuts = case
    tok = tokenizer(kind)
    cursor = TextCursor(tok, [], stop=stops, min_tokens=min_tokens)
    text, kept, logprobs, stop = joined(run(cursor, ids))
    want, want_stop = expected_stop(tok, ids, stops, min_tokens)
    assert (text, stop) == (want, want_stop)
    assert kept == ids[: len(kept)]
    assert logprobs == [f"lp{i}" for i in range(len(kept))]
    assert cursor.num_tokens == len(kept)
    assert cursor.stop_string == stop
    if stop is None:
        assert kept == ids
    else:
        assert tok.decode(kept).startswith(text), "the kept ids carry the text"
        before_last = complete_text(tok, kept[:-1])
        assert len(before_last) < len(text) or complete_text(tok, kept) == before_last, "none is behind the cut"
    grouped = TextCursor(tok, [], stop=stops, min_tokens=min_tokens)
    assert joined(run(grouped, ids, cuts)) == (text, kept, logprobs, stop), "several tokens in a step change nothing"


@MORE
@given(stop_cases())
def test_include_stop_str_shows_the_stop_string_whole(case: tuple[str, list[int], list[str], int, list[int]]) -> None:
    kind, ids, stops, min_tokens, cuts = case
    tok = tokenizer(kind)
    plain = joined(run(TextCursor(tok, [], stop=stops, min_tokens=min_tokens), ids))
    shown = joined(
        run(TextCursor(tok, [], stop=stops, min_tokens=min_tokens, include_stop_str_in_output=True), ids, cuts)
    )
    assert shown[3] == plain[3]
    assert shown[0] == plain[0] + (plain[3] or "")
    assert len(shown[1]) == len(shown[2]) >= len(plain[1])


@MORE
@given(stop_cases())
def test_only_what_could_become_a_stop_string_waits(case: tuple[str, list[int], list[str], int, list[int]]) -> None:
    kind, ids, stops, _, _ = case
    tok = tokenizer(kind)
    cursor, text, out = TextCursor(tok, [], stop=stops), "", 0
    for count, i in enumerate(ids, 1):
        delta = cursor.push([i])
        text, out = text + delta.text, out + len(delta.token_ids)
        if cursor.stop_string is not None:
            return
        waiting = complete_text(tok, ids[:count])[len(text) :]
        if out < count and waiting:
            begins = [s for s in stops for n in range(1, len(s)) if waiting.endswith(s[:n])]
            still_open = tok.decode(ids[:count]) != complete_text(tok, ids[:count])
            assert begins or still_open


def one_by_one(tok: Tokenizer, text: str) -> list[int]:
    return [i for char in text for i in tok.encode(char)]


@pytest.mark.parametrize(
    "text", ["안녕하세요 세계", "🙂🚀👨\u200d👩\u200d👧🇰🇷", "e\u0301\u0323 naïve", UNSEEN, "你好，世界。"]
)
@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "sentencepiece_bare"])
def test_characters_are_never_cut(kind: str, text: str) -> None:
    tok = tokenizer(kind)
    prompt = tok.encode("Say it:")
    texts = [d.text for d in run(TextCursor(tok, prompt), tok.encode(text, add_special_tokens=False))]
    assert "".join(texts).removeprefix(" ") == text
    assert text.count("�") == sum(t.count("�") for t in texts)


def test_a_character_that_spans_prompt_and_output_comes_out_whole() -> None:
    tok = tokenizer("sentencepiece_bare")
    first, *rest = tok.encode("🦙")
    assert rest, "the llama is made of byte tokens here"
    assert joined(run(TextCursor(tok, [first]), [*rest, *tok.encode("!")]))[0] == "🦙!"
    assert joined(run(TextCursor(tok, [first]), tok.encode("!")))[0] == "!"


def test_a_long_prompt_that_ends_in_broken_bytes_is_not_repeated() -> None:
    tok = tokenizer("byte_level")
    prompt = [*tok.encode("a long prompt " * 50), tok.encode("🦙")[0]]
    assert joined(run(TextCursor(tok, prompt), tok.encode("fine")))[0] == "fine"


def test_leading_space_is_kept_after_a_prompt_and_stripped_at_the_start() -> None:
    tok = tokenizer("sentencepiece")
    ids = tok.encode("hello world")
    assert joined(run(TextCursor(tok, tok.encode("Say")), ids))[0] == " hello world"
    assert joined(run(TextCursor(tok, []), ids))[0] == "hello world"
    bos = tok.bos_token_id
    assert bos is not None
    assert joined(run(TextCursor(tok, [bos]), ids))[0] == "hello world"
    assert joined(run(TextCursor(tok, [bos], skip_special_tokens=False), ids))[0] == " hello world"


def test_an_unfinished_character_is_flushed_at_the_end() -> None:
    tok = tokenizer("byte_level")
    ids = [*tok.encode("ok "), *tok.encode("🦙")[:2]]
    deltas = run(TextCursor(tok, []), ids)
    assert "".join(d.text for d in deltas[:-1]) == "ok "
    assert deltas[-1].text == "�"
    assert deltas[-1].token_ids == tuple(ids[-2:])


def test_a_stop_string_inside_one_token_cuts_it_and_keeps_its_id() -> None:
    tok = tokenizer("byte_level")
    world = tok.encode(" world")
    assert len(world) == 1
    delta = TextCursor(tok, [], stop=["l"]).push(world, ["lp"])
    assert delta == TextDelta(" wor", tuple(world), ("lp",), "l")


def test_a_stop_string_at_the_very_start_keeps_nothing() -> None:
    tok = tokenizer("byte_level")
    cursor = TextCursor(tok, [], stop=["he"])
    assert cursor.push(one_by_one(tok, "hel"), ["a", "b", "c"]) == TextDelta("", (), (), "he")
    assert cursor.num_tokens == 0


def test_tokens_after_a_match_are_ignored() -> None:
    tok = tokenizer("byte_level")
    cursor = TextCursor(tok, [], stop=["!"])
    assert cursor.push(one_by_one(tok, "ab!cd")).text == "ab"
    assert cursor.push(one_by_one(tok, "more")) == TextDelta("", (), ())
    assert cursor.finish() == TextDelta("", (), ())
    assert cursor.num_tokens == 2


def test_text_held_back_comes_out_when_it_is_no_stop_string_after_all() -> None:
    tok = tokenizer("byte_level")
    cursor = TextCursor(tok, [], stop=["###END"])
    texts = [cursor.push([i]).text for i in one_by_one(tok, "a###x##")]
    assert texts == ["a", "", "", "", "###x", "", ""]
    assert cursor.finish().text == "##"


def test_the_match_that_completes_first_wins() -> None:
    tok = tokenizer("byte_level")
    ids = one_by_one(tok, "xabcdef")
    assert joined(run(TextCursor(tok, [], stop=["abcdef", "cd"]), ids))[::3] == ("xab", "cd")
    assert TextCursor(tok, [], stop=["abcdef", "cd"]).push(ids)[::3] == ("xab", "cd")
    assert TextCursor(tok, [], stop=["d", "bcd"]).push(ids)[::3] == ("xa", "bcd"), "of two that end together the longer"


def test_the_match_that_completes_first_wins_inside_one_token() -> None:
    tok = tokenizer("byte_level")
    assert TextCursor(tok, [], stop=["world", "or"]).push(tok.encode(" world"))[::3] == (" w", "or")


def test_a_token_behind_a_broken_character_is_not_kept_for_it() -> None:
    tok = tokenizer("sentencepiece_bare")
    broken, x = tok.token_id("<0xE1>"), tok.token_id("x")
    assert broken is not None
    assert x is not None
    cursor = TextCursor(tok, [], stop=["x"])
    assert joined(run(cursor, [broken, x])) == ("�", [broken], ["lp0"], "x")


def test_min_tokens_counts_tokens_not_steps() -> None:
    tok = tokenizer("byte_level")
    ids = one_by_one(tok, "a.b.c.d")
    for cuts in ([], [7], [3, 5]):
        cursor = TextCursor(tok, [], stop=["."], min_tokens=2)
        assert joined(run(cursor, ids, cuts))[0] == "a.b"
        assert cursor.num_tokens == 3


@pytest.mark.parametrize(
    ("skip", "include", "text"), [(True, False, "hi"), (False, False, "hi"), (False, True, "hi</s>")]
)
def test_the_eos_that_ended_a_request_has_an_id_and_no_text(skip: bool, include: bool, text: str) -> None:
    tok = tokenizer("byte_level")
    assert tok.eos_token_id is not None
    ids = [*one_by_one(tok, "hi"), tok.eos_token_id]
    cursor = TextCursor(tok, [], skip_special_tokens=skip, include_stop_str_in_output=include)
    first = cursor.push(ids[:1], ["a"])
    last = cursor.finish(ids[1:], ["b", "c"], eos_is_last=True)
    assert first.text + last.text == text
    assert last.token_ids == tuple(ids[1:])
    assert last.logprobs == ("b", "c")
    assert cursor.num_tokens == 3


def test_a_stop_token_that_is_ordinary_text_is_not_shown_either() -> None:
    tok = tokenizer("byte_level")
    ids = one_by_one(tok, "hi!")
    assert TextCursor(tok, []).finish(ids, eos_is_last=True).text == "hi"
    assert TextCursor(tok, [], stop=["!"]).finish(ids, eos_is_last=True).stop_string is None


def test_special_tokens_have_text_only_when_asked_for() -> None:
    tok = tokenizer("sentencepiece")
    end = tok.token_id("<|im_end|>")
    assert end is not None
    ids = [*tok.encode("hello"), end, *tok.encode("again")]
    assert joined(run(TextCursor(tok, []), ids))[:2] == ("hello again", ids)
    assert joined(run(TextCursor(tok, [], skip_special_tokens=False), ids))[0] == "hello<|im_end|> again"


@pytest.mark.parametrize("text", ["hello world, hello there!", "the lazy dog"])
@pytest.mark.parametrize("prompt", ["", "Hello there"])
def test_other_decoders_stream_through_a_window(text: str, prompt: str) -> None:
    tok = tokenizer("wordpiece")
    ids, before = tok.encode(text), tok.encode(prompt)
    want = tok.decode([*before, *ids])[len(tok.decode(before)) :]
    text_out, out, _, _ = joined(run(TextCursor(tok, before), ids))
    assert (text_out, out) == (want, ids)


def test_a_special_token_does_not_push_the_context_out_of_the_window() -> None:
    tok = tokenizer("wordpiece")
    end = tok.token_id("<|im_end|>")
    assert end is not None
    ids = [*tok.encode("hello"), *[end] * 12, *tok.encode("world")]
    assert joined(run(TextCursor(tok, []), ids))[0] == tok.decode(ids) == "hello world"


def test_the_cost_of_a_token_does_not_grow_with_the_output() -> None:
    tok = tokenizer("byte_level")
    cursor = TextCursor(tok, [], stop=["never to be seen"])
    for i in one_by_one(tok, "the end of it " * 500):
        cursor.push([i])
    assert len(cursor._text) < 20
    assert len(cursor._waiting) < 20
