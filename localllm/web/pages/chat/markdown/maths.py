r"""Find a model's maths (`$…$`, `\(…\)`, and on lines of their own `$$…$$`, `\[…\]`), and write formulas as MathML.

The result is an element with the TeX, which a script renders (messages.js); without scripts the TeX is shown. A dollar
sign is a delimiter only if it touches the text inside and no text outside: "$5 and $6" stays text. A saved page has no
scripts, so its formulas become MathML (MathML Core, W3C): letters, numbers, operators, scripts, fractions, roots,
fences, matrices, accents, named functions, text and letter styles. A formula with anything else stays TeX.
Does not know: Markdown's other rules.
"""

from __future__ import annotations

import re
from functools import lru_cache
from html import escape, unescape

from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock
from markdown_it.rules_inline import StateInline

MAX_MATH_CHARS = 5_000
"""A longer formula stays text, because rendering it would take long."""

MAX_MATH_LINES = 60
"""Most lines of a display formula; the search for its end stops there."""

DISPLAYS = {"$$": "$$", "\\[": "\\]"}


def add_maths(md: MarkdownIt, *, open_ended: bool = False) -> MarkdownIt:
    """Teach a parser to find maths. `open_ended`: also accept a display formula that is not closed yet."""

    def block(state: StateBlock, start: int, end: int, silent: bool) -> bool:
        return _block(state, start, end, silent, open_ended)

    md.block.ruler.before("fence", "maths", block, {"alt": ["paragraph", "reference", "blockquote", "list"]})
    md.inline.ruler.before("escape", "maths", _inline)
    return md


def maths_html(tex: str, *, display: bool) -> str:
    """Return the element that a script renders; its text is the TeX."""
    if display:
        return f'<div class="maths maths--display" tabindex="0" data-maths="display">{escape(tex.strip())}</div>\n'
    return f'<span class="maths" data-maths="inline">{escape(tex.strip())}</span>'


def _block(state: StateBlock, start: int, end: int, silent: bool, open_ended: bool) -> bool:
    """Parse a display formula on lines of its own. TeX allows no blank line in it, so with one it is plain text."""
    if state.is_code_block(start):
        return False
    first = _line(state, start)
    closer = DISPLAYS.get(first[:2])
    if closer is None:
        return False
    may_be_open = open_ended and end - start <= MAX_MATH_LINES
    if not may_be_open and _last(state.src, closer) < state.bMarks[start] + 2:
        return False
    line, text = start, first[2:]
    while not text.rstrip().endswith(closer):
        line += 1
        if line >= end and may_be_open:
            break
        if line >= end or line - start > MAX_MATH_LINES or state.isEmpty(line):
            return False
        text += "\n" + _line(state, line)
    closed = text.rstrip().endswith(closer)
    tex = text.rstrip().removesuffix(closer)
    if closer in tex or (closed and not tex.strip()) or len(tex) > MAX_MATH_CHARS:
        return False
    if not silent:
        token = state.push("maths_block", "div", 0)
        token.content, token.markup, token.block = tex, closer if closed else "", True
        token.map = [start, min(line + 1, end)]
        state.line = min(line + 1, end)
    return True


def _line(state: StateBlock, line: int) -> str:
    return state.src[state.bMarks[line] + state.tShift[line] : state.eMarks[line]]


def _inline(state: StateInline, silent: bool) -> bool:
    source, at = state.src, state.pos
    opener = source[at : at + 2]
    if opener in ("\\(", "\\[", "$$"):
        closer = {"\\(": "\\)"}.get(opener) or DISPLAYS[opener]
        end = _find(source, closer, at + 2)
    elif opener[:1] == "$":
        opener = closer = "$"
        end = _end_of_dollars(source, at)
    else:
        return False
    tex = source[at + len(opener) : end] if end >= 0 else ""
    if not tex.strip() or len(tex) > MAX_MATH_CHARS:
        return False
    if not silent:
        token = state.push("maths_inline", "span", 0)
        token.content, token.markup = tex, opener
    state.pos = end + len(closer)
    return True


def _end_of_dollars(source: str, at: int) -> int:
    """Return the position of the closing dollar, or -1. Only the next dollar is considered, so that prices and shell
    variables cost no search.
    """
    before, inside = source[at - 1 : at], source[at + 1 : at + 2]
    if not inside or inside.isspace() or before.isalnum() or before == "$":
        return -1
    end = _find(source, "$", at + 1)
    while end > 0 and source[end - 1] == "\\":
        end = _find(source, "$", end + 1)
    if end < 0 or source[end - 1].isspace() or source[end + 1 : end + 2].isalnum() or source[end + 1 : end + 2] == "$":
        return -1
    return end


def _find(source: str, closer: str, start: int) -> int:
    """Return what `str.find` does, but search an unclosed formula only once and not again from every opener."""
    return source.find(closer, start) if start <= _last(source, closer) else -1


@lru_cache(maxsize=8)
def _last(source: str, closer: str) -> int:
    return source.rfind(closer)


_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|[0-9]+(?:\.[0-9]+)?|\s+|.", re.DOTALL)
_FORMULA = re.compile(
    r'<(span|div) class="(maths[^"]*)"(?: tabindex="0")? data-maths="(inline|display)">([^<]*)</\1>', re.DOTALL
)
MAX_DEPTH = 40

_NAMES = """
alpha α beta β gamma γ delta δ epsilon ϵ varepsilon ε zeta ζ eta η theta θ vartheta ϑ iota ι kappa κ lambda λ mu μ nu ν
xi ξ pi π rho ρ sigma σ tau τ upsilon υ phi ϕ varphi φ chi χ psi ψ omega ω Gamma Γ Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π
Sigma Σ Upsilon Υ Phi Φ Psi Ψ Omega Ω infty ∞ partial ∂ nabla ∇ hbar ℏ ell ℓ emptyset ∅ varnothing ∅ Re ℜ Im ℑ
aleph ℵ angle ∠ ldots … dots … cdots ⋯ vdots ⋮ ddots ⋱ top ⊤ bot ⊥
"""
_OPERATORS = """
times × cdot ⋅ div ÷ pm ± mp ∓ ast ∗ star ⋆ circ ∘ bullet • leq ≤ le ≤ geq ≥ ge ≥ neq ≠ ne ≠ approx ≈ equiv ≡ sim ∼
simeq ≃ cong ≅ propto ∝ ll ≪ gg ≫ in ∈ notin ∉ ni ∋ subset ⊂ subseteq ⊆ supset ⊃ supseteq ⊇ cup ∪ cap ∩ setminus ∖
land ∧ wedge ∧ lor ∨ vee ∨ neg ¬ lnot ¬ forall ∀ exists ∃ to → rightarrow → leftarrow ← leftrightarrow ↔ Rightarrow ⇒
implies ⟹ Leftarrow ⇐ Leftrightarrow ⇔ iff ⟺ mapsto ↦ uparrow ↑ downarrow ↓ oplus ⊕ otimes ⊗ odot ⊙ perp ⊥ parallel ∥
mid ∣ colon : sum ∑ prod ∏ int ∫ iint ∬ oint ∮ bigcup ⋃ bigcap ⋂ langle ⟨ rangle ⟩ lfloor ⌊ rfloor ⌋ lceil ⌈ rceil ⌉
lvert | rvert | lVert ‖ rVert ‖ vert | Vert ‖ lbrace { rbrace } prime ′
"""
NAMES = dict(zip(_NAMES.split()[::2], _NAMES.split()[1::2], strict=True))
OPERATORS = dict(zip(_OPERATORS.split()[::2], _OPERATORS.split()[1::2], strict=True))
_FUNCTIONS = """
sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh exp log ln lg det dim ker deg gcd arg lim max min sup inf
argmax argmin
"""
FUNCTIONS = frozenset(_FUNCTIONS.split())
LIMITS = frozenset({"sum", "prod", "bigcup", "bigcap", "lim", "max", "min", "sup", "inf", "argmax", "argmin"})
"""Commands whose scripts stand above and below in a display formula."""

ACCENTS = {
    "hat": "^", "widehat": "^", "bar": "¯", "overline": "¯", "vec": "→", "tilde": "~", "widetilde": "~", "dot": "˙",
    "ddot": "¨",
}  # fmt: skip
SPACES = {",": ".17em", ":": ".22em", ";": ".28em", " ": ".25em", "!": "0", "quad": "1em", "qquad": "2em"}
FENCES = {"matrix": "", "pmatrix": "()", "bmatrix": "[]", "vmatrix": "||", "cases": "{ ", "aligned": ""}
BOLD_A = {False: 0x1D400, True: 0x1D41A}  # of capitals, of small letters
NUMBER_SETS = dict(zip("CHNPQRZ", "ℂℍℕℙℚℝℤ", strict=True))
TEXTS = frozenset({"text", "textrm", "mathrm", "operatorname", "mathsf", "mathtt"})


class _Unsupported(Exception):
    """The formula has something that this module does not know."""


def with_mathml(html: str) -> str:
    """Return the HTML of render.py with its formulas as MathML; one that is not supported stays TeX."""
    return _FORMULA.sub(_replaced, html)


def _replaced(formula: re.Match[str]) -> str:
    display = formula[3] == "display"
    drawn = mathml(unescape(formula[4]), display=display)
    return f'<{formula[1]} class="{formula[2]}" data-drawn>{drawn}</{formula[1]}>' if drawn else formula[0]


def mathml(tex: str, *, display: bool) -> str:
    """Return a `math` element; empty if the formula is not supported."""
    try:
        row = _Parser(_TOKEN.findall(tex), display).row("")
    except (_Unsupported, RecursionError):
        return ""
    return f'<math display="block">{row}</math>' if display else f"<math>{row}</math>"


class _Parser:
    """A descent through the tokens of one formula. Each method returns one MathML element."""

    def __init__(self, tokens: list[str], display: bool) -> None:
        self._tokens, self._at, self._display, self._depth = tokens, 0, display, 0

    def _peek(self) -> str:
        while self._at < len(self._tokens) and self._tokens[self._at].isspace():
            self._at += 1
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _next(self) -> str:
        token = self._peek()
        self._at += 1
        return token

    def row(self, *ends: str) -> str:
        """Parse up to one of the tokens, which is not consumed."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _Unsupported
        parts = []
        while (token := self._peek()) not in ends:
            if not token or token in ("}", "&", "\\\\", "\\right", "\\end"):
                raise _Unsupported
            parts.append(self._with_scripts())
        self._depth -= 1
        return f"<mrow>{''.join(parts)}</mrow>"

    def _with_scripts(self) -> str:
        token = self._peek()
        base, scripts = ("<mrow></mrow>" if token in ("^", "_") else self._atom()), dict[str, str]()
        while (mark := self._peek()) in ("^", "_", "'"):
            self._next()
            key = "^" if mark == "'" else mark
            if key in scripts:
                raise _Unsupported
            scripts[key] = "<mo>′</mo>" if mark == "'" else self._argument()
        if not scripts:
            return base
        above = self._display and token.removeprefix("\\") in LIMITS
        below, over = scripts.get("_", ""), scripts.get("^", "")
        name = {(True, True): "subsup", (True, False): "sub", (False, True): "sup"}[bool(below), bool(over)]
        if above:
            name = {"subsup": "underover", "sub": "under", "sup": "over"}[name]
        return f"<m{name}>{base}{below}{over}</m{name}>"

    def _argument(self) -> str:
        """Parse a group, or one token."""
        if self._peek() == "{":
            self._next()
            row = self.row("}")
            self._next()
            return row
        token = self._peek()
        if token[:1].isdigit() and len(token) > 1:  # TeX takes one digit
            self._tokens[self._at] = token[1:]
            return f"<mn>{token[0]}</mn>"
        return self._atom()

    def _atom(self) -> str:
        if self._peek() == "{":
            return self._argument()
        token = self._next()
        if token.startswith("\\"):
            return self._command(token[1:])
        if token[:1].isdigit():
            return f"<mn>{token}</mn>"
        if token in ("", "}", "^", "_", "&", "#", "%", "$", "~"):
            raise _Unsupported
        return f"<mi>{escape(token)}</mi>" if token.isalpha() else f"<mo>{escape(token.replace('-', '−'))}</mo>"

    def _command(self, name: str) -> str:
        if name in NAMES:
            return f"<mi>{NAMES[name]}</mi>"
        if name in OPERATORS:
            return f"<mo>{escape(OPERATORS[name])}</mo>"
        if name in FUNCTIONS:
            return f"<mi>{name}</mi>"
        if name in SPACES:
            return f'<mspace width="{SPACES[name]}"></mspace>'
        if name in ("{", "}", "|", "%", "#", "&", "_", "$"):
            return f"<mo>{escape({'|': '‖'}.get(name, name))}</mo>"
        if name in ("frac", "dfrac", "tfrac"):
            return f"<mfrac>{self._argument()}{self._argument()}</mfrac>"
        if name in ACCENTS:
            return f'<mover accent="true">{self._argument()}<mo>{ACCENTS[name]}</mo></mover>'
        if name in TEXTS:
            return f"<mtext>{escape(self._text())}</mtext>"
        return self._structure(name)

    def _structure(self, name: str) -> str:
        match name:
            case "sqrt" if self._peek() == "[":
                self._next()
                index = self.row("]")
                self._next()
                return f"<mroot>{self._argument()}{index}</mroot>"
            case "sqrt":
                return f"<msqrt>{self._argument()}</msqrt>"
            case "mathbf" | "boldsymbol" | "bm" | "mathbb":
                return f"<mi>{_styled(self._text(), name)}</mi>"
            case "left":
                return self._fenced()
            case "begin":
                return self._table(self._text())
        raise _Unsupported

    def _text(self) -> str:
        """Return the text of a group without commands."""
        if self._next() != "{":
            raise _Unsupported
        end = next((at for at in range(self._at, len(self._tokens)) if self._tokens[at] == "}"), None)
        if end is None:
            raise _Unsupported
        text, self._at = "".join(self._tokens[self._at : end]), end + 1
        if "\\" in text or "{" in text:
            raise _Unsupported
        return text

    def _fenced(self) -> str:
        opener = self._fence()
        row = self.row("\\right")
        self._next()
        return f"<mrow>{opener}{row}{self._fence()}</mrow>"

    def _fence(self) -> str:
        token = self._next()
        mark = OPERATORS.get(token[1:], {"{": "{", "}": "}", "|": "‖"}.get(token[1:])) if token[:1] == "\\" else token
        if not mark or mark not in "().[]|/<>{}‖⟨⟩⌊⌋⌈⌉":
            raise _Unsupported
        return "" if mark == "." else f'<mo fence="true" stretchy="true">{escape(mark)}</mo>'

    def _table(self, environment: str) -> str:
        if environment not in FENCES:
            raise _Unsupported
        rows, cells = list[str](), list[str]()
        while True:
            cells.append(f"<mtd>{self.row('&', chr(92) * 2, chr(92) + 'end')}</mtd>")
            mark = self._next()
            if mark != "&":
                rows.append(f"<mtr>{''.join(cells)}</mtr>")
                cells = []
            if mark == "\\end":
                break
        if self._text() != environment:
            raise _Unsupported
        table, fences = f"<mtable>{''.join(rows)}</mtable>", FENCES[environment]
        left, right = (
            f'<mo fence="true" stretchy="true">{mark}</mo>' if mark.strip() else "" for mark in fences or "  "
        )
        return f"<mrow>{left}{table}{right}</mrow>"


def _styled(text: str, name: str) -> str:
    """Return letters in bold, or as the symbols of number sets."""
    if name == "mathbb":
        if not text or not set(text) <= NUMBER_SETS.keys():
            raise _Unsupported
        return "".join(NUMBER_SETS[letter] for letter in text)
    if not (text.isascii() and text.isalpha()):
        raise _Unsupported
    return "".join(chr(BOLD_A[c.islower()] + ord(c.lower()) - ord("a")) for c in text)
