"""The frame of every HTML page: one self-contained file, nothing from the network, light and dark, all text escaped.

The scripts and style sheets are files of this package, without any text of the page. A content security policy names them by their
digests, so that a browser runs nothing else, whatever a name or a file contains.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from pytest_gpumem.reporting.plots.svg import TEMPLATES, static


def anchor(key: str) -> str:
    """The element of a row, by `Row.key`: the same in every page, of letters and digits, so that links to it stay valid."""
    return f"t-{hashlib.sha256(key.encode(errors='surrogatepass')).hexdigest()[:12]}"


def rendered(template: str, *, styles: Sequence[str], scripts: Sequence[str], title: str, simulated: str, **content: object) -> str:
    """The page that a template makes, which extends `page.html`.

    Args:
        template: file of `TEMPLATES`.
        styles: files of `TEMPLATES`, one style sheet together.
        scripts: such files, one script together, behind the one of all pages.
        simulated: what was simulated; empty if nothing was.
        content: what the template takes besides.
    """
    style, script = "".join(map(static, styles)), "".join(map(static, ("page.js", *scripts)))
    # Names of tests and labels come from anybody: nothing reaches the page unescaped.
    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.get_template(template).render(
        policy=f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; base-uri 'none'; form-action 'none'",
        style=Markup(style),
        script=Markup(script),
        title=title,
        simulated=simulated,
        **content,
    )


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
