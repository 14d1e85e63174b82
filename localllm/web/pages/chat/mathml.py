"""TeX formulas as MathML, for a saved page, in which no script can draw them.

Supported: letters, numbers, operators, scripts, fractions, roots, fences, matrices, accents, named functions, text and
letter styles. A formula with anything else stays TeX. On the chat page a script of its own draws far more.
Reference: MathML Core (W3C).
Does not know: Markdown, where formulas come from.
"""

from __future__ import annotations

import re
from html import escape, unescape

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
    """Return the HTML of markdown.py with its formulas as MathML; one that is not supported stays TeX."""
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
    """Return letters as bold ones, or as those of number sets."""
    if name == "mathbb":
        if not text or not set(text) <= NUMBER_SETS.keys():
            raise _Unsupported
        return "".join(NUMBER_SETS[letter] for letter in text)
    if not (text.isascii() and text.isalpha()):
        raise _Unsupported
    return "".join(chr(BOLD_A[c.islower()] + ord(c.lower()) - ord("a")) for c in text)
