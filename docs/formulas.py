"""Shows the formulas of docstrings and pages as mathematics on the site.

Formulas are written in plain Unicode, as in ``v_j = squash(Σ_i c_ij û_ij)``, so that `help` and a text editor show them
well. While Sphinx builds the site, `latex` translates each line to LaTeX, and docutils translates LaTeX to MathML.
Browsers show MathML without a script, also offline.
"""

import re
from collections.abc import Sequence
from typing import Any

from docutils.nodes import SkipNode
from docutils.utils.math.latex2mathml import tex2mathml

FUNCTIONS = {"max", "min", "log", "ln", "exp", "sign", "clip", "squash", "softmax", "logistic"}
FUNCTIONS |= {"LayerNorm", "BatchNorm"}
SYMBOLS = {
    "²": "^2",
    "⁺": "^+",
    "⁻": "^-",
    "½": r"\frac{1}{2}",
    "Σ": r"\sum ",
    "·": r"\cdot ",
    "…": r"\ldots ",
    "∝": r"\propto ",
    "≠": r"\neq ",
    "≤": r"\leq ",
    "∇": r"\nabla ",
    "ₓ": "_x",
    "∂": r"\partial ",
    "ᵀ": "^T",
    "×": r"\times ",
    "−": "-",
    "⎸": r"\lvert ",
    "⎹": r"\rvert ",
}
TOKENS = re.compile(
    r"(?P<code>`[^`]+`)"
    r"|(?P<name>[^\W\d_]+(?:_[A-Za-z0-9]+)+|[^\W\d_]+_\{[^}]*\})"  # names with indices, such as D_use_ij
    r"|(?P<words>[A-Za-z]+(?:-[A-Za-z]+)*(?:,? [A-Za-z]+(?:-[A-Za-z]+)*(?![\w^]))*(?![\w^])[,:;]?)"
    r"|(?P<root>√\w)|(?P<other>.)"
)


def latex(line: str) -> str:
    """Translate a line of formulas to LaTeX. Two or more spaces separate formulas and remarks."""
    depth = (len(line) - len(line.lstrip())) // 4
    parts = re.split(r" {2,}", re.sub(r" *= *", " = ", line.strip()))
    return r"\qquad " * depth + r"\qquad ".join(map(_part, parts))


def _part(part: str) -> str:
    if not re.search(r"[=·/^_²|]|\(\w\)", part):  # a remark
        return "".join(
            rf"\mathtt{{{text}}}" if odd else rf"\text{{{text}}}"
            for odd, text in zip((0, 1) * len(part), part.split("`"), strict=False)
            if text
        )
    part = re.sub(r" ?([=+/·−]) ?", r"\1", part.replace(" - ", "−"))
    part = re.sub(r"\^\(([^()]*)\)|\^(-\|[^|]*\|)", lambda found: f"^{{{found[1] or found[2]}}}", part)
    part = re.sub(r"\|([^|\[\]]+)\|", r"⎸\1⎹", part)
    return "".join(_token(found.lastgroup or "", found[0]) for found in TOKENS.finditer(part))


def _token(kind: str, text: str) -> str:
    if kind == "name":
        base, *indices = re.split(r"_(?![^{]*\})", text)
        last = indices[-1].strip("{}")
        if len(last) > 3 and "{" not in text:  # one name with underscores, such as mass_floor
            return rf"\text{{{text}}}"
        long = base.isascii() and len(base) > 1
        upper = rf"^{{\text{{{indices[0]}}}}}" if len(indices) > 1 and not long else ""
        base = rf"\text{{{'_'.join([base, *indices[:-1]])}}}" if long else SYMBOLS.get(base, base)
        return f"{base.strip()}_{{{''.join(SYMBOLS.get(letter, letter) for letter in last)}}}{upper} "
    if kind == "words":
        words = text.split(" ")
        if all(len(word.strip(",:;")) == 1 or word in FUNCTIONS for word in words):
            return " ".join(rf"\operatorname{{{word}}}" if word in FUNCTIONS else word for word in words)
        function = words.pop(0) if words[0] in FUNCTIONS else ""
        return (rf"\operatorname{{{function}}}\," if function else "") + rf"\text{{{' '.join(words)}}}"
    if kind == "code":
        return rf"\mathtt{{{text.strip('`')}}}"
    if kind == "root":
        return rf"\sqrt{{{text[1]}}}"
    return r"\," if text == " " else SYMBOLS.get(text, text)


def is_formula(block: Sequence[str]) -> bool:
    """Return whether a literal block is a formula, not Python, a shell command or a table."""
    return any("=" in line for line in block) and not any(re.search(r">>>|\(\"|^\s*import ", line) for line in block)


def block_of(lines: Sequence[str]) -> list[str]:
    """Return the directive ``math`` for the lines of a literal block."""
    margin = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
    rows = [rf"{latex(line[margin:])} \\" for line in lines if line.strip()]
    return [
        ".. math::",
        "   :no-wrap:",
        "",
        r"   \begin{aligned}",
        *(f"   {row}" for row in rows),
        r"   \end{aligned}",
        "",
    ]


def in_docstring(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Replace the literal blocks of a docstring that contain formulas."""
    text = "\n".join(lines)
    found = re.compile(r"(?m)^( *)((?:\S.*)?)::\n\n((?:\1 +\S.*\n?|\n)+)")

    def replaced(match: re.Match[str]) -> str:
        indent, before, block = match.group(1), match.group(2), match.group(3).rstrip("\n").split("\n")
        if before.startswith(".. ") or not is_formula(block):
            return match.group(0)
        introduction = [f"{indent}{before}:", ""] if before else []
        return "\n".join([*introduction, *(f"{indent}{line}".rstrip() for line in block_of(block)), ""]) + "\n"

    lines[:] = found.sub(replaced, text).split("\n")


def on_page(app: Any, name: str, source: list[str]) -> None:
    """Replace the code blocks of a page whose language is ``formula``."""

    def replaced(match: re.Match[str]) -> str:
        return "\n".join(["```{eval-rst}", *block_of(match.group(1).split("\n")), "```"])

    source[0] = re.sub(r"(?ms)^```formula\n(.*?)^```$", replaced, source[0])


def write_math(self: Any, node: Any) -> None:
    """Write a formula as MathML."""
    self.body.append(tex2mathml(node.astext(), as_block=node.tagname == "math_block"))
    raise SkipNode


def setup(app: Any) -> dict[str, bool]:
    """Register this module as an extension of Sphinx."""
    app.add_html_math_renderer("mathml", (write_math, None), (write_math, None))
    app.connect("autodoc-process-docstring", in_docstring, priority=100)
    app.connect("source-read", on_page)
    return {"parallel_read_safe": True}
