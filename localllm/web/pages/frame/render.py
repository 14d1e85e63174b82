"""Render views as HTML: one Jinja environment, with strict undefined names and automatic escaping.

`render(view)` renders a view with its own template. In a template `{{ show(view.kv_usage) }}` renders a nested view, so
a page and a live event use the same file.
Does not know: requests, responses, the engine.
"""

from __future__ import annotations

import re
from datetime import timedelta
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from litestar.plugins.jinja import JinjaTemplateEngine
from litestar.template.config import TemplateConfig
from markupsafe import Markup, escape

from localllm import units
from localllm.version import __version__
from localllm.web.pages.frame.static import static_url
from localllm.web.pages.frame.views import View

FRAME = Path(__file__).resolve().parent
"""The templates of every page, named without a folder; those of one page are named `chat/page.html`."""
_OWN_PAGE = re.compile(r"(?<!\S)/(?:dashboard|library|logs|playground|settings|tune)(?:[/#][\w/-]*\w)?(?![\w/])")


@cache
def environment() -> Environment:
    """Return the environment; templates are compiled once per process."""
    env = Environment(
        loader=FileSystemLoader([FRAME, FRAME.parent]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    env.filters.update(
        bytes=units.format_bytes,
        seconds=units.format_seconds,
        count=units.format_count,
        percent=percent,
        age=age,
        own_links=own_links,
    )
    env.globals.update(show=show, static=static_url, version=__version__)
    return env


def render(view: View) -> str:
    """Return the view as HTML."""
    return environment().get_template(view.template).render(view=view)


def show(view: View) -> Markup:
    """Render a view inside the template of another one."""
    return Markup(render(view))


def template_config() -> TemplateConfig[JinjaTemplateEngine]:
    """Return the same environment, for handlers that answer with Litestar's `Template`."""
    return TemplateConfig(instance=JinjaTemplateEngine.from_environment(environment()))


def percent(fraction: float) -> str:
    """0.1234 -> '12 %'; a small share keeps one digit so that it does not look like zero."""
    share = fraction * 100
    return f"{share:.1f} %" if 0 < share < 9.95 else f"{share:.0f} %"


def age(seconds: float) -> str:
    """Format a duration: '4 s', '1:05', '1 d, 2:03:00'."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    return str(timedelta(seconds=whole))


def own_links(text: str) -> Markup:
    """Return a hint of an error in which the addresses of our pages are links: "cancel the run at /tune"."""
    escaped = str(escape(text))
    return Markup(_OWN_PAGE.sub(lambda found: f'<a class="text-link" href="{found[0]}">{found[0]}</a>', escaped))
