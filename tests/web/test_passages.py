"""Passages of long files: how a text is cut, which passages a question finds, what is stored with a chat."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.web.api.documents import PAGE
from localllm.web.pages.chat.files import passages as question
from localllm.web.pages.chat.files.long_files import CANDIDATES
from localllm.web.pages.chat.files.passages import (
    OVERLAP_BYTES,
    OWN_BYTES,
    by_sentence,
    cut,
    estimated_tokens,
    fitting,
    fused,
    nearest,
    packed,
    spread,
)
from localllm.web.pages.chat.store import Chats, StoredMessage
from localllm.web.pages.chat.store.database import MIGRATIONS, open_database
from tests.web.harness import FACTS, book

ALPHABET = "ab .!?\n\té。永\U0001f600'\"\f\r"
TEXTS = st.one_of(
    st.text(ALPHABET, max_size=200),
    st.lists(
        st.one_of(
            st.sampled_from(["\n\n", "\f", ". ", " ", "\n", "words " * 30, "x" * 2500, "永远" * 900, " " * 1500]),
            st.text(ALPHABET, max_size=40),
        ),
        max_size=14,
    ).map("".join),
)


# Cutting -------------------------------------------------------------------------------------------------------------


@given(TEXTS, st.booleans())
def test_the_own_parts_are_the_text_again_and_no_passage_is_too_large(text: str, paged: bool) -> None:
    passages = cut(text, paged=paged)
    assert "".join(each.text[each.overlap :] for each in passages) == text
    at = 0
    for each in passages:
        own = each.text[each.overlap :]
        assert 0 < len(own.encode()) <= OWN_BYTES
        assert len(each.text[: each.overlap].encode()) <= OVERLAP_BYTES
        assert text[at - each.overlap : at + len(own)] == each.text, "an overlap is what precedes the own part"
        mark = PAGE if paged else "\n"
        assert each.first == 1 + text[:at].count(mark)
        assert each.last == each.first + own.rstrip().count(mark)
        at += len(own)


@given(TEXTS)
def test_no_passage_is_of_two_pages(text: str) -> None:
    for each in cut(text, paged=True):
        assert PAGE not in each.text.removesuffix(PAGE)


def test_borders_are_those_of_paragraphs_then_sentences_then_words() -> None:
    paragraphs = [f"Paragraph {n} " + "has some words. " * 20 for n in range(9)]
    for each in cut("\n\n".join(paragraphs)):
        assert each.text[each.overlap :].startswith("Paragraph")
    for each in cut("One sentence of eight words and no more. " * 200):
        assert each.text[each.overlap :].startswith("One sentence")
    for each in cut("word " * 2_000):
        assert each.text.startswith("word")


def test_neighbours_overlap_by_whole_words() -> None:
    passages = cut(" ".join(f"word{n}" for n in range(2_000)))
    assert len(passages) > 10
    assert all(0 < each.overlap <= OVERLAP_BYTES and each.text.startswith("word") for each in passages[1:])


def test_a_text_of_twenty_megabytes_is_cut_in_time_that_grows_with_its_length() -> None:
    """Counted, not timed: each character is looked at a bounded number of times."""
    assert len(cut("x" * 200_000)) == 200
    assert len(cut("\n" * 200_000)) == 200
    assert len(cut('!"' * 100_000)) == 200


# Questions -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "before", "terms"),
    [
        ("Who built the lighthouse of Varnholm?", "", ["built", "lighthouse", "varnholm"]),
        ("And in 1950?", "How many people lived in Varnholm?", ["1950", "people", "lived", "varnholm"]),
        ("Wie hoch ist der Turm?", "", ["hoch", "turm"]),
        ("What is this about?", "", []),
        ('"quoted" AND NOT (near) *', "x y z", ["quoted", "near"]),
        ("永远的图书馆", "", ["永 远", "远 的", "的 图", "图 书", "书 馆"]),
    ],
)
def test_the_terms_of_a_question(asked: str, before: str, terms: list[str]) -> None:
    assert question.with_context(asked, before) == terms


@given(st.text(max_size=80))
def test_no_typed_text_is_an_operator_of_the_query(text: str) -> None:
    db = sqlite3.connect(":memory:")
    db.execute("CREATE VIRTUAL TABLE words USING fts5 (text)")
    if terms := question.terms(text):
        db.execute("SELECT * FROM words WHERE words MATCH ?", (question.query(terms),)).fetchall()
    db.close()


# Ranking -------------------------------------------------------------------------------------------------------------


def test_rankings_are_joined_by_rank_and_one_alone_counts_too() -> None:
    assert fused([[1, 2, 3, 5], [1, 3, 4]]) == [1, 3, 2, 4, 5]
    assert fused([[5, 6], []]) == [5, 6]
    assert fused([[1, 2, 3], [9, 2, 1]])[:3] == [1, 9, 2], "the best by one ranking is not below those of two"
    assert fused([]) == []


def test_what_fits_is_chosen_by_rank_and_given_in_the_order_of_the_file() -> None:
    sizes = {1: 40, 2: 50, 3: 100, 9: 10}
    assert fitting([9, 3, 2, 1], sizes, 110) == [3, 9]
    assert fitting([9, 2, 3, 1], sizes, 110) == [1, 2, 9], "one that does not fit is passed over"
    assert fitting([3], sizes, 99) == []


def test_samples_are_spread() -> None:
    assert spread(3, 5) == [0, 2, 1]
    assert spread(100, 4) == [0, 50, 25, 75]
    assert spread(0, 4) == []
    assert spread(100, 1) == [0]
    assert sorted(spread(10, 99)) == list(range(10))


def test_vectors_are_ranked_by_cosine_and_those_of_another_model_are_left_out() -> None:
    rows = [(1, packed([0, 1, 0])), (2, packed([5, 1, 0])), (3, packed([1, 0, 0])), (4, packed([1, 0]))]
    assert nearest(packed([2, 0, 0]), rows, 2) == [3, 2]
    assert nearest(packed([0, 0, 0]), [], 2) == []


def test_tokens_are_estimated_by_bytes() -> None:
    assert estimated_tokens("word " * 8) == 10
    assert estimated_tokens("永远") == 2
    assert estimated_tokens("") == 0


# Search over known texts ---------------------------------------------------------------------------------------------


@pytest.fixture
def chats(tmp_path: Path) -> Iterator[Chats]:
    db, _ = open_database(tmp_path / "chats.db")
    yield Chats(db)
    db.close()


def search(chats: Chats, chat_id: str, file_id: str, asked: str, before: str = "", most: int = 3) -> list[str]:
    terms = question.with_context(asked, before)
    numbers = chats.matching(chat_id, [file_id], question.query(terms), CANDIDATES)
    found = chats.passages(chat_id, numbers)
    ranking = by_sentence(terms, {number: found[number].text for number in numbers})
    return [found[number].text for number in ranking[:most]]


def test_the_answer_is_in_the_first_three_passages_of_nine_in_ten_questions(chats: Chats) -> None:
    assert len(FACTS) == 60
    text = book()
    chat = chats.create("", "t", {})
    file_id = chats.add_long_file(chat.id, "book.txt", False, cut(text))
    assert len(cut(text)) > 150
    found = [any(fact in passage for passage in search(chats, chat.id, file_id, asked)) for fact, asked in FACTS]
    assert sum(found) >= 54, [asked for (_, asked), hit in zip(FACTS, found, strict=True) if not hit]


def test_a_short_question_is_understood_with_the_one_before_it(chats: Chats) -> None:
    chat = chats.create("", "t", {})
    file_id = chats.add_long_file(chat.id, "book.txt", False, cut(book()))
    passages = search(chats, chat.id, file_id, "And in Tamsk?", "Who designed the lighthouse in Ocre?")
    assert any("Ada Stern4" in passage for passage in passages)


def test_words_are_found_in_other_forms_without_accents_and_in_chinese(chats: Chats) -> None:
    chat = chats.create("", "t", {})
    texts = ["Résumés of the running committees.", "这座图书馆建于一九五零年。", "Nothing else."]
    file_id = chats.add_long_file(chat.id, "a.txt", False, [each for text in texts for each in cut(text)])
    for asked, answer in (("resume", 0), ("committee", 0), ("run", 0), ("图书馆是什么时候建的", 1)):
        assert search(chats, chat.id, file_id, asked, most=1) == [texts[answer]]


# The store -----------------------------------------------------------------------------------------------------------


def test_passages_of_another_chat_or_owner_are_not_found(chats: Chats) -> None:
    one, two = chats.create("ann", "t", {}), chats.create("bob", "t", {})
    file_id = chats.add_long_file(one.id, "secret.txt", True, cut("The secret is zinc."))
    query = question.query(["secret"])
    (number,) = chats.matching(one.id, [file_id], query, 5)
    assert chats.passages(one.id, [number])[number].where == "p. 1"
    assert chats.matching(two.id, [file_id], query, 5) == []
    assert chats.passages(two.id, [number]) == {}
    assert chats.sampled(two.id, [file_id], 5) == []
    assert chats.known_files(two.id, [file_id]) == []
    chats.add_vectors("m", {number: b"\0\0"})
    assert chats.vectors(two.id, [file_id], "m") == []
    assert chats.without_vector(two.id, "m", 9, 9) == []


def test_a_deleted_chat_takes_its_files_with_it_and_wipe_leaves_no_word(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    db, _ = open_database(path)
    chats = Chats(db)
    kept, gone = chats.create("", "kept", {}), chats.create("", "gone", {})
    for chat in (kept, gone):
        file_id = chats.add_long_file(chat.id, "a.txt", False, cut(f"Xylophones and {chat.title} zithers. " * 90))
        numbers = chats.matching(chat.id, [file_id], "xylophones", 9)
        chats.add_vectors("m", dict.fromkeys(numbers, b"\0\0"))
    chats.delete("", gone.id)
    chats.purge(1e12)
    left = {name: db.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in ("file", "passage_vector")}
    assert left == {"file": 1, "passage_vector": len(numbers)}
    assert db.execute("SELECT count(*) FROM passage_words WHERE passage_words MATCH 'gone'").fetchone()[0] == 0
    chats.wipe("")
    assert [db.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in ("file", "passage")] == [0, 0]
    db.close()
    assert b"xylophon" not in b"".join(each.read_bytes().lower() for each in tmp_path.iterdir())


def test_embeddings_are_asked_for_once_and_only_of_the_beginning_of_a_long_file(chats: Chats) -> None:
    chat = chats.create("", "t", {})
    file_id = chats.add_long_file(chat.id, "a.txt", False, cut("word " * 2_000))
    rows = chats.without_vector(chat.id, "m", 100, 4)
    assert len(rows) == 4
    chats.add_vectors("m", {rows[0][0]: b"ab", 10**9: b"cd"})
    assert [number for number, _ in chats.without_vector(chat.id, "m", 100, 4)] == [number for number, _ in rows[1:]]
    assert len(chats.without_vector(chat.id, "another", 2, 100)) == 2
    assert chats.vectors(chat.id, [file_id], "m") == [(rows[0][0], b"ab")]


def test_a_forked_chat_has_its_own_copy_of_the_files_on_its_branch(chats: Chats) -> None:
    chat = chats.create("", "t", {})
    file_id = chats.add_long_file(chat.id, "a.txt", True, cut("First.\fSecond zinc.", paged=True))
    chats.add_long_file(chat.id, "b.txt", False, cut("On another branch."))
    details = {"files": [{"name": "a.txt", "file": file_id, "num_bytes": 9}, {"name": "c.txt", "text": "whole"}]}
    question = chats.add(chat.id, None, "user", "?", details)
    fork = chats.fork("", chat.id, question.id)
    (copied, whole) = chats.all_messages(fork.id)[0].details["files"]
    assert whole == details["files"][1]
    chats.delete("", chat.id)
    chats.purge(1e12)
    assert chats.known_files(fork.id, [copied["file"]]) == [copied["file"]] != [file_id]
    (number,) = chats.matching(fork.id, [copied["file"]], "zinc", 5)
    assert chats.passages(fork.id, [number])[number].where == "p. 2"
    assert chats.sampled(fork.id, [copied["file"]], 9) == [number - 1, number], "the other branch's file is not copied"
    other = chats.add_long_file(fork.id, "d.txt", False, cut("Word. " * 2_000))
    first = chats.sampled(fork.id, [copied["file"], other], 6)
    assert first[:4] == [number - 1, number + 1, number, first[3]], "each file has its turn"
    assert first[3] > number + 4


def test_chats_of_the_version_before_keep_their_messages(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    before = next(number for number, script in enumerate(MIGRATIONS) if "CREATE TABLE passage" in script)
    db = sqlite3.connect(path)
    for script in MIGRATIONS[:before]:
        db.executescript(script)
    db.execute("INSERT INTO chat (id, owner, title, updated_s) VALUES ('c', '', 'old', 1)")
    db.execute("INSERT INTO message (id, chat_id, role, created_s, text) VALUES ('m', 'c', 'user', 1, 'hello')")
    db.execute(f"PRAGMA user_version = {before}")
    db.commit()
    db.close()
    upgraded, notice = open_database(path)
    chats = Chats(upgraded)
    assert notice == ""
    assert chats.all_messages("c") == [StoredMessage("m", None, "user", "hello", {}, 1.0, ("m",))]
    file_id = chats.add_long_file("c", "a.txt", False, cut("zinc"))
    assert len(chats.matching("c", [file_id], "zinc", 5)) == 1
    upgraded.close()
