"""Texts whose replaced tokens are marked: as lines for the terminal, and as a page of HTML."""

from __future__ import annotations

import html
from typing import Any, TextIO

_BEGIN = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>$TITLE</title>
<style>
  body { font: 16px/2 system-ui, sans-serif; margin: 1.5rem auto; max-width: 60rem; color: #1c2733; background: #fff; }
  h1 { font-size: 1.1rem; font-weight: 600; margin: 0 0 .2rem; }
  .about, .scale { font-size: .85rem; line-height: 1.4; color: #55606c; margin: 0 0 1rem; }
  .text { border-top: 1px solid #d5dbe1; margin: 0; padding: .5rem 0; white-space: pre-wrap; }
  span { border-radius: 3px; padding: 2px 0; }
  .marked { text-decoration: underline; text-decoration-thickness: 2px; font-weight: 600; }
  .wrong { outline: 2px dashed #1864ab; }
  .scale span { padding: 2px 8px; }
</style>
</head>
<body>
<h1>$TITLE</h1>
<p class="about">The darker a token, the more probable it is that it was replaced; tokens above one half are underlined.
The number is shown when the pointer is on a token. If the original text is known, it is below
in grey, and a dashed frame marks a token that is judged wrongly.</p>
<p class="scale">$SCALE</p>
"""
_END = "</body>\n</html>\n"
_BOLD_RED, _PLAIN = "\033[1;31m", "\033[0m"


def marked(record: dict[str, Any], *, colours: bool = False) -> str:
    """The text of a record; each token that is found replaced is in brackets with its probability."""
    begin, end = (_BOLD_RED, _PLAIN) if colours else ("", "")
    return _with_tokens(
        record,
        str,
        lambda index, token: (
            f"{begin}[{token} {record['probabilities'][index]:.2f}]{end}" if record["replaced"][index] else token
        ),
    )


class MarkedLines:
    """Writes records one by one as lines of ``marked``, with colours in a terminal."""

    def __init__(self, file: TextIO) -> None:
        self.file, self.colours = file, file.isatty()

    def write(self, record: dict[str, Any]) -> None:
        self.file.write(marked(record, colours=self.colours) + "\n")

    def close(self) -> None:
        """Ends the lines, which need nothing more."""


class Page:
    """Writes records one by one into a page that needs no other file."""

    def __init__(self, file: TextIO, title: str) -> None:
        self.file = file
        scale = " ".join(_span(f"{value:.0%}", value, "") for value in (0.0, 0.25, 0.5, 0.75, 1.0))
        file.write(_BEGIN.replace("$TITLE", html.escape(title)).replace("$SCALE", scale))

    def write(self, record: dict[str, Any]) -> None:
        gold = record.get("gold")

        def token(index: int, text: str) -> str:
            replaced = record["replaced"][index]
            names = ["marked"] * replaced + ["wrong"] * (gold is not None and gold[index] != replaced)
            return _span(html.escape(text), record["probabilities"][index], " ".join(names))

        original = record.get("original")
        below = "" if original is None else f'<small class="about">\n{html.escape(original)}</small>'
        self.file.write(f'<p class="text">{_with_tokens(record, html.escape, token)}{below}</p>\n')

    def close(self) -> None:
        self.file.write(_END)


def _span(text: str, probability: float, names: str) -> str:
    kind = f' class="{names}"' if names else ""
    colour = f"rgba(217, 72, 15, {0.85 * probability:.3f})"
    return f'<span{kind} style="background: {colour}" title="{probability:.1%}">{text}</span>'


def _with_tokens(record: dict[str, Any], between: Any, token: Any) -> str:
    """The text of a record, each token and each part between tokens converted by these functions."""
    text, parts, done = record["text"], [], 0
    for index, (start, token_text) in enumerate(zip(record["starts"], record["tokens"], strict=True)):
        space = len(token_text) - len(token_text.lstrip())  # a token may start with the space before its word
        start, token_text = start + space, token_text.lstrip()
        if start < done or not token_text:  # several tokens of the same character
            continue
        parts += [between(text[done:start]), token(index, token_text)]
        done = start + len(token_text)
    return "".join([*parts, between(text[done:])])
