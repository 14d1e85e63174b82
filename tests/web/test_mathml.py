"""Formulas of a saved page: the supported ones as MathML, all others as TeX, none as markup of its own."""

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.web.pages.chat.markdown.maths import mathml, with_mathml
from localllm.web.pages.chat.markdown.render import render_markdown

PIECES = (
    "x", "12.5", "+", " ", "^", "_", "{", "}", "\\frac", "\\sqrt", "[", "]", "\\alpha", "\\sum", "\\left",
    "\\right", "(",
    ")", ".", "\\begin{pmatrix}", "\\end{pmatrix}", "&", "\\\\", "\\text{<b>}", "<", "'", "\\hat", "\\mathbb{R}", "\\,",
    "\\unknown", "\\mathbf", "|", "\\", "é", "\\begin",
)  # fmt: skip
_NAMES = """
math mrow mi mn mo mtext mspace mfrac msqrt mroot msub msup msubsup munder mover munderover mtable mtr mtd
"""
NAMES = set(_NAMES.split())


@pytest.mark.parametrize(
    ("tex", "found"),
    [
        ("x_i^2", "<msubsup><mi>x</mi><mi>i</mi><mn>2</mn></msubsup>"),
        ("-1.5", "<mo>−</mo><mn>1.5</mn>"),
        (r"\frac{a}{2}", "<mfrac><mrow><mi>a</mi></mrow><mrow><mn>2</mn></mrow></mfrac>"),
        (r"\frac12 x^10", "<mfrac><mn>1</mn><mn>2</mn></mfrac><msup><mi>x</mi><mn>1</mn></msup><mn>0</mn>"),
        (r"\sqrt[3]{x}", "<mroot><mrow><mi>x</mi></mrow><mrow><mn>3</mn></mrow></mroot>"),
        (r"\sin\theta", "<mi>sin</mi><mi>θ</mi>"),
        (r"\mathbb{R} \mathbf{Ab}", "<mi>ℝ</mi><mi>𝐀𝐛</mi>"),
        (r"\text{a < b}", "<mtext>a &lt; b</mtext>"),
        (r"\left[ x \right.", '<mo fence="true" stretchy="true">[</mo><mrow><mi>x</mi></mrow></mrow>'),
        (r"\begin{matrix} 1 & 2 \\ 3 & 4 \end{matrix}", "</mtd></mtr><mtr><mtd>"),
        ("f'", "<msup><mi>f</mi><mo>′</mo></msup>"),
    ],
)
def test_a_formula_is_drawn(tex: str, found: str) -> None:
    assert found in mathml(tex, display=False)


def test_limits_are_above_and_below_only_in_a_display_formula() -> None:
    assert "<munderover><mo>∑</mo>" in mathml(r"\sum_{i}^n i", display=True)
    assert "<msubsup><mo>∑</mo>" in mathml(r"\sum_{i}^n i", display=False)


@pytest.mark.parametrize(
    "tex", [r"\unknown", r"\color{red}{x}", "{" * 99, "a_b_c", "{x", "x}", r"\href{x}{y}", "$", "&"]
)
def test_what_is_not_supported_stays_tex(tex: str) -> None:
    assert mathml(tex, display=True) == ""


@given(st.lists(st.sampled_from(PIECES), max_size=20).map("".join))
def test_any_formula_is_well_formed_and_has_only_known_elements(tex: str) -> None:
    drawn = mathml(tex, display=True)
    if drawn:
        assert {element.tag for element in ElementTree.fromstring(drawn).iter()} <= NAMES


def test_the_formulas_of_a_page_are_replaced_and_the_others_left() -> None:
    html = with_mathml(render_markdown("Price $5. $a < b$ and\n\n$$\n\\frac{1}{2}\n$$\n\nand $\\unknown$ `$x$`"))
    assert html.count("<math") == 2
    assert '<span class="maths" data-drawn><math><mrow><mi>a</mi><mo>&lt;</mo><mi>b</mi></mrow></math></span>' in html
    assert re.search(r'<div class="maths maths--display" data-drawn><math display="block">', html)
    assert '<span class="maths" data-maths="inline">\\unknown</span>' in html
    assert "<code>$x$</code>" in html
