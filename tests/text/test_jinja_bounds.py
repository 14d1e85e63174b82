"""Templates that would never end, or take all memory, end with a word on it; each runs where a crash would be seen."""

import json
import subprocess
import sys
import time

import pytest

from localllm.errors import CorruptModel
from localllm.text import jinja_bounds
from localllm.text.answers.detect import answer_format
from localllm.text.chat_template import _ROLE_TEST, ChatTemplate, TemplateWithoutEnd
from localllm.text.jinja_sandbox import MOST_SOURCE, JinjaTemplate

_LAUGHS = "{% set a = ['a'] * 9 %}{% set b = ['a'] * 9 %}" + "{% set a = [a] * 9 %}{% set b = [b] * 9 %}" * 12
_TUPLES = "{% set a = (1, 2) %}" + "{% set a = (a, a, a, a, a, a, a, a, a) %}" * 12
_BIG = "{% set x = 'a' * 1000000 %}"
_GROWS = "{% set ns = namespace(x='aaaaaaaa', l=[]) %}{% for i in range(60) %}"
_TWICE = "{% for i in range(99999) %}{% for j in range(99999) %}"

HOSTILE = {
    "loops": _TWICE + "{% endfor %}{% endfor %}",
    "loops that print": _TWICE + "x" * 10_000 + "{% endfor %}{% endfor %}",
    "loops into a variable": "{% set y %}" + _TWICE + "x" * 10_000 + "{% endfor %}{% endfor %}{% endset %}{{ y }}",
    "a macro of macros": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(40) }}",
    "times": "{% set x = 'a' * 2000000000 %}",
    "a list, times": "{% set x = [1] * 2000000000 %}",
    "numbers": "{% set ns = namespace(x=7) %}" + "{% set ns.x = ns.x * ns.x %}" * 60,
    "powers": "{{ 9 ** (9 ** 9) }}",
    "doubled by +": _GROWS + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubled by ~": _GROWS + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "width in %": "{{ '%0999999999d' % 1 }}",
    "width beside %": "{{ '%*d' % (999999999, 1) }}",
    "width in format": "{{ '{:>999999999}'.format(1) }}",
    "width beside format": "{{ '{:>{w}}'.format(1, w=999999999) }}",
    "width in a filter": "{{ '%999999999d'|format(1) }}",
    "center": "{{ 'a'|center(1000000000) }}",
    "ljust": "{{ 'a'.ljust(1000000000) }}",
    "replace": _BIG + "{{ x.replace('a', x) }}",
    "replace by filter": _BIG + "{{ x|replace('a', x) }}",
    "join": _BIG + "{{ x.join(['b'] * 100000) }}",
    "join by filter": _BIG + "{{ (['b'] * 100000)|join(x) }}",
    "join of long ones": _BIG + "{{ ([x] * 100000)|join }}",
    "join of made ones": _BIG + "{{ range(99999)|map('replace', '1', x)|join }}",
    "tabs": _BIG + "{{ x.replace('a', '\t').expandtabs(1000000) }}",
    "indent": _BIG + "{{ x|replace('a', '\n')|indent(1000000) }}",
    "wrap": _BIG + "{{ x|wordwrap(1, true, x) }}",
    "translate": _BIG + "{{ x.translate({97: x}) }}",
    "many long ones": "{{ range(99999)|map('center', 100000)|list|length }}",
    "a billion laughs": _LAUGHS + "{{ a }}",
    "as text": _LAUGHS + "{{ a|string|length }}",
    "as JSON": _LAUGHS + "{{ a|tojson }}",
    "in a format": _LAUGHS + "{{ '%s' % [a] }}",
    "joined": _LAUGHS + "{{ 'x' ~ a }}",
    "in a namespace": _LAUGHS + "{% set ns = namespace(a=a) %}{{ ns }}",
    "compared": _LAUGHS + "{{ a == b }}",
    "looked for": _LAUGHS + "{{ a in [b] }}",
    "asked": _LAUGHS + "{{ a is eq b }}",
    "selected": _LAUGHS + "{{ [a]|select('==', b)|list|length }}",
    "sorted": _LAUGHS + "{{ [a, b]|sort|length }}",
    "found": _LAUGHS + "{{ [a].index(b) }}",
    "hashed": _TUPLES + "{{ {a: 1}|length }}",
    "hashed by look-up": _TUPLES + "{{ {}[a] }}",
    "hashed by get": _TUPLES + "{{ {}.get(a) }}",
    "sum of lists": "{{ ([[1] * 100000] * 100000)|sum(start=[])|length }}",
    "slices": "{{ [1]|slice(1000000000)|list|length }}",
    "batches": "{{ [1]|batch(1000000000, 1)|list|length }}",
    "parts": _BIG
    + "{% set ns = namespace(l=[]) %}{% for i in range(9999) %}{% set ns.l = ns.l + [x[1:]] %}{% endfor %}",
    "indent of JSON": "{{ [1, 2]|tojson(indent=1000000000) }}",
    "lipsum": "{{ lipsum(n=1000000000) }}",
    "a date": "{{ strftime_now('%999999999Y') }}",
}

RENDER = """
import json, resource, sys
from localllm.text.jinja_sandbox import JinjaTemplate
from localllm.text import jinja_bounds
for name in ("MOST_TURNS", "MOST_CHARACTERS", "MOST_IN_ALL"):
    setattr(jinja_bounds, name, getattr(jinja_bounds, name) // 10)  # as hard to get around, and sooner done
resource.setrlimit(resource.RLIMIT_AS, (3 * 2**30,) * 2)
failed = []
for name, source in json.load(sys.stdin).items():
    try:
        JinjaTemplate(source).render({"messages": []})
        failed.append(f"{name}: rendered")
    except MemoryError:
        failed.append(f"{name}: no memory")
    except Exception:
        pass
[peak] = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(json.dumps([failed, int(peak)]))  # ru_maxrss would count the process that forked this one
"""


def test_hostile_templates_end_and_take_little() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", RENDER], input=json.dumps(HOSTILE), capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    failed, most_kib = json.loads(ended.stdout)
    assert not failed
    assert most_kib < 1_000_000


@pytest.mark.parametrize(
    "source", ["{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{% if 1 %}" * 3000, "a" * (MOST_SOURCE + 1)]
)
def test_a_template_that_does_not_become_a_program_is_told(source: str) -> None:
    with pytest.raises(CorruptModel, match="does not compile"):
        ChatTemplate(source).render([{"role": "user", "content": "Hi"}])


def test_the_load_says_what_the_template_costs() -> None:
    with pytest.raises(TemplateWithoutEnd, match="1,000,000 loop iterations"):
        answer_format(ChatTemplate(HOSTILE["loops"]))


def test_the_clock_ends_what_nobody_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jinja_bounds, "MOST_CPU_S", 0.0)
    with pytest.raises(jinja_bounds.TemplateTooCostly, match="0 s"):
        JinjaTemplate("{% for i in range(1000) %}{% endfor %}").render({})


def test_loops_stay_what_they_were() -> None:
    source = (
        "{% for a in x %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}{{ loop.previtem }}{% endfor %}"
        "{% for a in x|select %}{{ loop.length }}{{ loop.revindex }}{% else %}none{% endfor %}"
        "{% for k, v in d.items() recursive %}{{ k }}{% if v is mapping %}{{ loop(v.items()) }}{% endif %}{% endfor %}"
        "{% for a in absent %}{% else %}nothing{% endfor %}"
        "{% for c in 'ab' if c != 'a' %}{{ c }}{% break %}{% endfor %}"
        "{{ x[1:]|join('-') }}{{ x[::-1] == x|reverse|list }}{{ {'a': x}['a'][0] ~ 1 ~ none }}{{ 1 < 2 < 3 }}"
        "{{ '%s-%d' % ('a', 2) }}{{ 'a{}b'.format(3) }}{{ x|map('string')|join(',') }}{{ d|items|list|length }}"
        "{{ ['b', 'a']|sort|first }}{{ [{'k': 1}]|selectattr('k', 'eq', 1)|list }}{{ x|join(d='+') }}"
    )
    values = {"x": [1, 2, 3], "d": {"p": {"q": 1}}}
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    assert JinjaTemplate(source).render(values) == plain.from_string(source).render(values)


def test_roles_are_found_in_time_by_the_length_of_the_template() -> None:
    began_s = time.process_time()
    for blanks in (
        "role ==" + " " * 250_000,
        "role == " * 30_000,
        "role" + "'" * 250_000,
        'role in ["a"' + ", " * 100_000,
    ):
        _ROLE_TEST.findall(blanks)
    assert time.process_time() - began_s < 2  # an hour where blanks are tried in every way
    assert _ROLE_TEST.findall("message['role'] == 'tool' or m.role in ['a', \"b\"]") == ["'tool'", "'a', \"b\""]
