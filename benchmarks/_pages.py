"""One picture for light and for dark pages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping


def for_both(svg: str, dark: Mapping[str, str]) -> str:
    """Return a picture with a style that replaces its colours on dark pages.

    Parameters
    ----------
    svg : str
        The picture for light pages. Colours stand in the attributes ``fill`` and ``stroke``, or in
        ``style``.
    dark : Mapping[str, str]
        The colours for dark pages, by those of the picture.
    """
    rules = "\n".join(_rules(svg, dark))
    style = f"<style>@media (prefers-color-scheme: dark) {{\n{rules}\n}}</style>"
    return re.sub(r"<svg[^>]*>", lambda head: f"{head[0]}\n{style}", svg, count=1)


def _rules(svg: str, dark: Mapping[str, str]) -> Iterator[str]:
    for light, other in dark.items():
        for name in ("fill", "stroke"):
            if f'{name}="{light}"' in svg:
                yield f'[{name}="{light}"] {{{name}: {other}}}'
            if f"{name}: {light}" in svg:
                yield f'[style*="{name}: {light}"] {{{name}: {other} !important}}'
