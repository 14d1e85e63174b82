"""Markdown from a model: whole, safe, and cut into blocks without changing what it says."""

import re
import string
import time
from html import escape, unescape

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.web.pages.chat.markdown import render
from localllm.web.pages.chat.markdown.render import BlockSplitter, LastHeading, code_block, render_markdown
from localllm.web.pages.chat.markdown.stream import text_html, user_html
from tests.web.pages_stub import HOSTILE, REPLY

ALLOWED_TAGS = {
    *("p", "em", "strong", "s", "code", "pre", "div", "span", "button", "a", "h3", "h4", "h5", "h6", "ul", "ol", "li"),
    *("blockquote", "hr", "br", "table", "thead", "tbody", "tr", "th", "td", "input"),
}
PIECES = [
    "# heading\n", "text ", "*em* ", "\n", "\n\n", "- item\n", "1. one\n", "```python\n", "```\n", "~~~\n", "x = 1\n",
    "> quote\n", "| a | b |\n", "|---|--:|\n", "| 1 | 2 |\n", "    code\n", "---\n", "<script>alert(1)</script>",
    "[x](javascript:alert(1))", "![i](http://e.example/i.png)", "<img src=x onerror=y>", "  ", "\\", "`", "**", "[a]: http://b\n",
    "$a$ ", "$$\n", "\\[\n", "\\]\n", "\\(x\\)", "$5 ", "- [x] ", "https://a.b/(c). ", "http://", "http://[",
]  # fmt: skip


def split(text: str, sizes: list[int]) -> list[str]:
    splitter, blocks, at = BlockSplitter(), [], 0
    while at < len(text):
        size = sizes[at % len(sizes)] if sizes else 1
        closed = splitter.push(text[at : at + size])
        at += size
        blocks += [closed] if closed else []
    rest = splitter.finish()
    return [*blocks, rest] if rest else blocks


def tags(html: str) -> set[str]:
    return {name.lower() for name in re.findall(r"<\s*/?\s*([a-zA-Z][\w:-]*)", html)}


def test_headings_leave_out_no_level_and_a_text_in_pieces_has_the_levels_of_the_whole() -> None:
    text = "### Steps\n\n##### Details\n\n# Title\n\n> ###### Deep\n\n## Part\n\n"
    assert re.findall(r"<h(\d)>", render_markdown(text)) == ["3", "4", "3", "4", "4"]
    last = LastHeading()
    assert "".join(render_markdown(block, last) for block in split(text, [3])) == render_markdown(text)


@given(st.lists(st.sampled_from(PIECES), max_size=25).map("".join), st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_splitting_keeps_every_character(text: str, sizes: list[int]) -> None:
    assert "".join(split(text, sizes)) == text


@given(st.lists(st.sampled_from(PIECES), max_size=25).map("".join))
def test_only_known_tags_and_links_come_out(text: str) -> None:
    html = "".join(render_markdown(block) for block in split(text, [3]))
    assert tags(html) <= ALLOWED_TAGS
    assert not re.search(r"<[^>]*\s(on\w+|style|src|hx-[\w:-]+)=", html)
    assert all(link.startswith(("http://", "https://", "mailto:")) for link in re.findall(r'href="([^"]*)', html))


@given(st.text(max_size=300))
def test_any_text_renders(text: str) -> None:
    assert tags(render_markdown(text)) <= ALLOWED_TAGS


def test_blocks_render_as_the_whole_does() -> None:
    assert "".join(render_markdown(block) for block in split(REPLY, [3])) == render_markdown(REPLY)


def test_a_block_is_given_back_once_it_is_closed() -> None:
    splitter = BlockSplitter()
    assert splitter.push("para") == ""
    assert splitter.push("graph\nstill\n") == ""
    assert splitter.push("\n") == "paragraph\nstill\n\n"
    assert splitter.push("```py\nx = 1\n\ny") == ""
    assert splitter.open_block() == ("code", "x = 1\n\ny", "py")
    assert splitter.push("\n```\n") == "```py\nx = 1\n\ny\n```\n"
    assert splitter.push("- one\n\n- two\n\n") == ""  # a list may go on after a blank line
    assert splitter.push("After") == ""
    assert splitter.push(" it.\n") == "- one\n\n- two\n\n"
    assert splitter.open_block() == ("text", "After it.\n", "")


def test_hostile_reply_is_text() -> None:
    html = render_markdown(HOSTILE)
    assert tags(html) <= ALLOWED_TAGS
    assert "&lt;script&gt;" in html
    assert "https://evil.example/p.png" in html  # as a link to follow, not as an image to load
    assert not re.search(r'(href|src)="(javascript|data)', html)


def test_image_becomes_a_link_that_says_what_it_is() -> None:
    html = render_markdown("![a cat](https://example.com/cat.png)")
    assert '<a class="chip" href="https://example.com/cat.png"' in html
    assert "Image: a cat" in html
    assert "<img" not in html


@pytest.mark.parametrize(
    "url",
    [
        "javascript:x",
        "JaVaScRiPt:x",
        "data:text/html,x",
        "vbscript:x",
        "file:///etc/passwd",
        "/dashboard",
        "//e.example",
    ],
)
def test_links_lead_only_to_web_and_mail(url: str) -> None:
    assert "href" not in render_markdown(f"[x]({url})")


def test_table_alignment_needs_no_style_attribute() -> None:
    html = render_markdown("| a | b |\n|:-:|--:|\n| 1 | 2 |\n")
    assert 'class="align-center"' in html
    assert 'class="align-right"' in html
    assert "style=" not in html


def test_long_code_block_is_left_uncoloured_and_whole() -> None:
    source = "x = 1\n" * 20_000
    html = render_markdown(f"```python\n{source}```\n")
    assert html.count("x = 1\n") == 20_000
    assert '<span class="k' not in html


MATHS = [
    ("$a+b$", "<p>{a+b}</p>"),
    (r"\(a\) and \[b\] and $$c$$", "<p>{a} and {b} and {c}</p>"),
    (r"$\alpha$", r"<p>{\alpha}</p>"),
    (r"$a\$b$", r"<p>{a\$b}</p>"),
    ("**$a$**", "<p><strong>{a}</strong></p>"),
    ("$<b>$", "<p>{&lt;b&gt;}</p>"),
    ("$$\na\n- b\n$$", "[a\n- b]"),
    ("\\[\na\n\\]", "[a]"),
    ("$$ a $$\nmore", "[a]\n<p>more</p>"),
    ("text\n$$\na\n$$", "<p>text</p>\n[a]"),
]
TEXT = [
    *(
        "$5 and $6",
        "It costs $5, or $10.",
        "US$5 to 6$",
        "$HOME/$USER",
        "$ a $",
        "$a $b",
        "a $$ b",
        "$$\nopen",
        "$$\na\n\nb\n$$",
    ),
    *("`$a$`", "\\$a$", "\\\\(a\\\\)", "    $$\n    a\n    $$", "```\n$$\na\n$$\n```", "$" + "x" * 6000 + "$"),
]


@pytest.mark.parametrize(("text", "drawn"), MATHS)
def test_maths_is_found(text: str, drawn: str) -> None:
    html = render_markdown(text).strip()
    html = re.sub(r'<span class="maths" data-maths="inline">(.*?)</span>', r"{\1}", html)
    html = re.sub(r'<div class="maths maths--display"[^>]*>(.*?)</div>', r"[\1]", html, flags=re.S)
    assert html == drawn


@pytest.mark.parametrize("text", TEXT)
def test_money_variables_and_code_are_no_maths(text: str) -> None:
    assert "data-maths" not in render_markdown(text)


def test_a_display_stays_open_until_it_closes_whatever_its_lines_look_like() -> None:
    splitter = BlockSplitter()
    assert splitter.push("$$\na\n- b\n= c\n") == ""
    assert splitter.push("$$\n") == "$$\na\n- b\n= c\n$$\n"


@pytest.mark.parametrize(
    "piece", ["[", "![", "*a **b ", "\\(", "$a ", "<", "_a", "a\n", "\\[\na\n", "- ", "> ", "|a", "[a](", "`a``b"]
)
def test_a_megabyte_of_anything_is_drawn_soon_and_whole(piece: str) -> None:
    text = piece * (1_000_000 // len(piece))
    begin = time.process_time()
    html = text_html(text)
    assert time.process_time() - begin < 5
    assert len(html) > 200
    if not piece.startswith((">", "-")):
        assert html.endswith(f"{escape(piece)}</p>\n") or escape(piece).strip() in html[-40:]


def test_many_code_blocks_are_coloured_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "MAX_HIGHLIGHTED_CHARS", 1_000)
    html = render_markdown("```python\nimport os\n```\n\n" * 200)
    assert html.count("import") == 200
    assert html.count('<span class="kn">') == 1_000 // len("import os\n")


@pytest.mark.parametrize("language", ["python", "py", "Python", "c++", "sh", "ts", "yml", "html", "rs", "dockerfile"])
def test_common_languages_are_coloured(language: str) -> None:
    assert "<span class=" in code_block("if a: 'b' # c\n<a>\n", language).partition("<pre")[2]


@pytest.mark.parametrize(
    ("source", "language"),
    [
        ("\t" * 100, "easytrieve"),  # hours at 20,000
        ("a\n" * 100, "csharp"),
        ("x = 1\n" * 700, "python"),
        ("\n" * (render.MAX_EMPTY_LINES + 2), "c"),
        ("\r" * (render.MAX_EMPTY_LINES + 2), "java"),
        (" \n" * (render.MAX_EMPTY_LINES + 2), "cpp"),
        ("import os", ""),
        ("import os", "no such language"),
    ],
)
def test_what_takes_long_to_colour_stays_as_it_is(monkeypatch: pytest.MonkeyPatch, source: str, language: str) -> None:
    monkeypatch.setattr(render, "highlight", lambda *args: pytest.fail("it was given to a lexer"))
    assert escape(source) in code_block(source, language)


def test_markdown_in_a_code_block_names_no_lexer_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pygments' lexer of Markdown would take any for the blocks within."""
    asked: list[str] = []
    monkeypatch.setattr("pygments.lexers.get_lexer_by_name", lambda name, **more: asked.append(name))
    html = code_block("# Title\n```easytrieve\n\tx\n```\n", "markdown")
    assert "<span class=" in html
    assert not asked


UNITS = (
    *string.printable,
    *(
        "/*",
        "((",
        '"\\',
        "'\\",
        "<!--",
        "'''",
        '"""',
        "//",
        "{{",
        "[[",
        "<a ",
        "a ",
        "a\n",
        " \n",
        "\t\n",
        "${",
        "#{",
        "$(",
    ),
    *(
        "`a",
        "@a",
        "\\a",
        "a=",
        "a.",
        "a:",
        "a,",
        "a(",
        "--",
        "<<a\n",
        "%{",
        "\\begin{a}",
        "&a",
        "&#",
        "\r\n",
        "0x",
        "1e",
        "1.",
    ),
)


@pytest.mark.slow
@pytest.mark.parametrize("language", sorted(render.COLOURED))
def test_no_coloured_language_takes_long_for_any_repeated_beginning(language: str) -> None:
    """A language that is quadratic takes half a second here, one that is cubic an hour: then stop the test by hand."""
    slowest_s, unit = max(
        (seconds_to_colour((unit * render.MAX_HIGHLIGHT_CHARS)[: render.MAX_HIGHLIGHT_CHARS], language), unit)
        for unit in UNITS
    )
    assert slowest_s < 3, f"{slowest_s:.1f} s for {unit!r}"


def seconds_to_colour(source: str, language: str) -> float:
    begin = time.process_time()
    code_block(source, language)
    return time.process_time() - begin


def test_a_long_open_block_is_not_parsed_again_at_every_line() -> None:
    splitter = BlockSplitter()
    begin = time.process_time()
    for _ in range(6_000):
        splitter.push("a line of a list that does not end\n")
    assert time.process_time() - begin < 5


# Task lists, addresses, and what a person typed -----------------------------------------------------------------------


def test_a_list_of_tasks_has_boxes_that_cannot_be_clicked() -> None:
    html = render_markdown("- [ ] todo\n- [x] **done**\n- [X] also\n- [] no\n- text [ ] no\n\n[ ] no list")
    assert html.count("<input") == html.count("disabled") == 3
    assert html.count('checked aria-label="Done"') == 2
    assert '<li class="task"><input class="task__box" type="checkbox" disabled aria-label="Not done"> todo</li>' in html
    assert "[ ] no list" in html
    assert render_markdown("1. [ ] one\n\n2. [x] two").count("<input") == 2, "loose and ordered lists, too"


@pytest.mark.parametrize(
    ("text", "link", "rest"),
    [
        ("See https://a.example/b?c=d&e=f.", "https://a.example/b?c=d&amp;e=f", "."),
        ("(https://a.example/b_(c))", "https://a.example/b_(c)", ")"),
        ("http://a.example/x, and", "http://a.example/x", ", and"),
        ("**https://a.example**", "https://a.example", "</strong>"),
        ("看https://a.example/x。然后", "https://a.example/x", "。然后"),
        ("https://127.0.0.1:8000/v1", "https://127.0.0.1:8000/v1", ""),
    ],
)
def test_a_bare_address_is_a_link(text: str, link: str, rest: str) -> None:
    html = render_markdown(text)
    assert f'<a href="{link}" rel="noopener noreferrer nofollow" target="_blank">{link}</a>{rest}' in html


@pytest.mark.parametrize(
    "text",
    ["javascript://a.example", "file://a/b", "xhttp://a.example", "https://", "http://[", "https://.", "`https://a.b`",
     "ftp://a.example"],
)  # fmt: skip
def test_other_addresses_and_code_stay_text(text: str) -> None:
    assert "<a " not in render_markdown(text)


def test_an_address_in_a_link_is_not_a_link_again() -> None:
    assert render_markdown("[https://a.example](https://b.example)").count("<a ") == 1
    assert render_markdown("<https://a.example>").count("<a ") == 1


def test_code_of_a_person_is_drawn_and_all_else_stays_as_typed() -> None:
    typed = "# *Not* a heading & <b>\n  `a < b` and ``c ` d`` but `` x\n```python\nx = 1 < 2\n```\nafter\n~~~\nopen"
    html = user_html(typed)
    assert html.startswith(
        "# *Not* a heading &amp; &lt;b&gt;\n  <code>a &lt; b</code> and <code>c ` d</code> but `` x\n"
    )
    assert html.count('<div class="code">') == 2
    assert "</div>after\n<div" in html
    assert html.endswith("open</code></pre></div>")
    assert user_html("<i> `<a>` <b> `x") == "&lt;i&gt; <code>&lt;a&gt;</code> &lt;b&gt; `x"


@given(st.lists(st.sampled_from([*PIECES, "``` `", "`` ` ", "\x0b", "\u2028"]), max_size=25).map("".join))
def test_a_persons_text_loses_only_the_marks_of_its_code(text: str) -> None:
    html = user_html(text)
    assert tags(html) <= {"div", "span", "button", "pre", "code"}
    bare = re.sub(r'<div class="code__bar">.*?</div>', "", html, flags=re.S)
    left = unescape(re.sub(r"<[^>]*>", "", bare))
    it = iter(text + "\n")  # coloured code always ends with a line break
    assert all(character in it for character in left), "a subsequence of what was typed"
    if "`" not in text and "~~~" not in text:
        assert left == text


@pytest.mark.parametrize(
    ("columns", "rows", "is_table"),
    [(200, 50, True), (10, 1900, True), (201, 1, False), (2000, 50, False), (100, 250, False)],
    ids=["wide", "long", "too wide", "much too wide", "too many cells"],
)
def test_a_table_beyond_the_limits_is_shown_as_text(columns: int, rows: int, is_table: bool) -> None:
    header, line = "|a" * columns, "|-" * columns
    started_s = time.process_time()
    drawn = render_markdown("\n".join([header, line, *["|b" * columns] * rows]) + "\n\nafter")
    assert ("<table>" in drawn) is is_table
    assert drawn.endswith("<p>after</p>\n")
    assert drawn.count("b") >= rows  # nothing is lost
    assert time.process_time() - started_s < 4
