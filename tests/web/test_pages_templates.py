"""Every template draws its view, strictly and safely."""

import importlib
import pkgutil
import re
from dataclasses import fields, is_dataclass, replace
from html.parser import HTMLParser
from typing import Any

import pytest

from localllm.web import pages
from localllm.web.pages import PAGES
from localllm.web.pages.dashboard.views import DashboardPage
from localllm.web.pages.frame.patterns import samples
from localllm.web.pages.frame.render import FRAME, age, percent, render
from localllm.web.pages.frame.views import View

SAMPLES = samples(PAGES)
TEMPLATES = {
    path.relative_to(FRAME if path.is_relative_to(FRAME) else FRAME.parent).as_posix(): path
    for path in sorted(FRAME.parent.rglob("*.html"))
}
EVIL = "\"'><script>evil()</script>&amp;<img src=x onerror=evil()>"
MARKUP_FIELDS = {"html", "thinking_html", "parts", "samples"}  # what is markup already, made safe by its maker
CHOICES = {"sheets", "role", "kind", "state", "finish_reason", "here", "theme"}
VOID = {"meta", "link", "input", "br", "hr", "img", "rect", "path", "polyline"}


class Outline(HTMLParser):
    """Tags with attributes, and whether they nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open[-1] == tag, f"</{tag}> closes <{self.open[-1]}>"
        self.open.pop()


def view_classes() -> set[type[View]]:
    modules = [
        importlib.import_module(each.name) for each in pkgutil.walk_packages(pages.__path__, f"{pages.__name__}.")
    ]
    found = {kind for module in modules for kind in vars(module).values() if isinstance(kind, type)}
    return {kind for kind in found if issubclass(kind, View)} - {View}


def poisoned(value: Any, name: str = "") -> Any:
    """The same view with hostile text wherever text may be."""
    if is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in fields(value) if f.name not in MARKUP_FIELDS and f.name not in CHOICES]
        return replace(value, **{name: poisoned(getattr(value, name), name) for name in names})
    if isinstance(value, tuple):
        return tuple(poisoned(item, name) for item in value)
    return EVIL if isinstance(value, str) and value else value


def test_every_view_has_a_sample_and_every_template_a_view() -> None:
    drawn = {type(sample) for sample in SAMPLES}
    assert drawn == view_classes()
    names = {name for name in TEMPLATES if name.rpartition("/")[2] not in ("base.html", "_macros.html")}
    assert names == {kind.template for kind in view_classes()}


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: type(sample).__name__)
def test_template_draws_its_sample_with_tags_that_nest(sample: View) -> None:
    assert not Outline(render(sample)).open


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: type(sample).__name__)
def test_text_never_becomes_markup(sample: View) -> None:
    drawn = render(poisoned(sample))
    tags = Outline(drawn).tags
    assert not [
        tag for tag, attributes in tags if tag == "script" and not (attributes.get("src") or "").startswith("/static/")
    ]
    assert not [tag for tag, attributes in tags if tag == "img" and attributes.get("class") != "file__thumb"]
    assert not [name for _, attributes in tags for name in attributes if name.startswith("on")]


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_need_no_inline_code_or_style(name: str) -> None:
    source = TEMPLATES[name].read_text()
    assert not re.search(r"<script(?![^>]* src=)", source)
    assert not re.search(r"\s(style|on[a-z]+)=", source)
    assert "hx-on" not in source
    assert "js:" not in source
    assert "http:" not in source.replace("http-equiv", "")
    assert "https:" not in source


def test_ids_on_the_dashboard_are_unique() -> None:
    page = next(sample for sample in SAMPLES if isinstance(sample, DashboardPage) and sample.dashboard)
    ids = [attributes["id"] for _, attributes in Outline(render(page)).tags if "id" in attributes]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize(
    ("share", "text"), [(0.0, "0 %"), (0.004, "0.4 %"), (0.0994, "9.9 %"), (0.62, "62 %"), (1, "100 %")]
)
def test_percent_keeps_small_shares_visible(share: float, text: str) -> None:
    assert percent(share) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.3, "0 s"), (59.9, "59 s"), (65, "1:05 min"), (7384, "2:03:04")])
def test_age_is_read_at_a_glance(seconds: float, text: str) -> None:
    assert age(seconds) == text
