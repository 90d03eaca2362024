"""Turns the reST in the docstrings into what MkDocs shows: formulas, links, lists of arguments.

Formulas become MathML, which browsers draw without any script.
"""

import html
import inspect
import re
from typing import Any

import griffe
from latex2mathml.converter import convert

MATH_BLOCK = re.compile(r"^( *)\.\. math::\n((?:\1 +\S.*\n?|\s*\n)+)", re.MULTILINE)
INLINE_MATH = re.compile(r":math:`([^`]+)`")
ROLE = re.compile(r":(?:func|class):`~?(?:mars_optax\.)?([\w.]+)`")
LINK = re.compile(r"`([^`<]+?)\s+<(https?://[^>]+)>`_")
SHARED_ARGUMENTS = re.compile(r"^ {4}(\w+(?:,\s+\w+)+): ", re.MULTILINE)
REFERENCES = re.compile(r"^References:\n((?: {4}.*\n?|\s*\n)+)", re.MULTILINE)
RAISED_TOGETHER = re.compile(r"^ {4}(\w+Error), (\w+Error): (.*)$", re.MULTILINE)


def mathml(latex: str) -> str:
    """The content of a <math> element for one formula without line breaks."""
    latex = latex.strip().replace(r"\_", "_")
    converted = convert(latex)
    return converted[converted.index(">") + 1 : converted.rindex("</math>")]


def math_block(match: re.Match[str]) -> str:
    """Rows of aligned columns, as in LaTeX's aligned."""
    rows = [row for row in re.split(r"\\\\", " ".join(match[2].split())) if row.strip()]
    table = "".join(
        "<mtr>" + "".join(f"<mtd>{mathml(cell)}</mtd>" for cell in row.split("&")) + "</mtr>"
        for row in rows
    )
    math = f'<math display="block"><mtable displaystyle="true">{table}</mtable></math>'
    return f'{match[1]}<div class="formula">{math}</div>\n\n'


def join_shared(match: re.Match[str]) -> str:
    return "    " + " ".join(match[1].split()) + ": "


def to_markdown(text: str) -> str:
    text = MATH_BLOCK.sub(math_block, text)
    text = INLINE_MATH.sub(lambda m: f"<math>{mathml(m[1])}</math>", text)
    text = ROLE.sub(lambda m: f"[`{m[1]}`][mars_optax.{m[1]}]", text)
    text = LINK.sub(lambda m: f"[{html.escape(' '.join(m[1].split()))}]({m[2]})", text)
    text = SHARED_ARGUMENTS.sub(join_shared, text)
    text = RAISED_TOGETHER.sub(r"    \1: \3\n    \2: \3", text)
    text = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
    return REFERENCES.sub(lambda m: f"**References:** {inspect.cleandoc(m[1])}", text)


class RestToMarkdown(griffe.Extension):
    """Rewrites every docstring as soon as it is collected."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)
