"""``sentence_starts``: splits texts of any language into sentences, by the Unicode properties of characters.

Every line starts a sentence. Within a line a sentence starts

    after . ! ? (also of Arabic, Devanagari, Ethiopic ...), closing quotes and a space, if the next character, after
    opening quotes, is a digit or a letter that is not lower case: a capital, or a letter of a script without capitals,
    such as Hangul, kana, Chinese characters, Arabic or Devanagari;
    after the full-width punctuation of Chinese and Japanese, with or without a space;

but not after an initial, a title or another abbreviation, nor between a German ordinal number and its noun.
"""

from __future__ import annotations

import re

_CLOSING = "[\"')\\]\u201d\u2019\u00bb\u300d\u300f\u3011\uff09\u300b\u3009]*"
_OPENING = "[\"'(\\[\u201c\u2018\u201e\u00ab\u300c\u300e\u3010\uff08\u300a\u3008\u00bf\u00a1]*"
_END = ".!?\u2026\u061f\u06d4\u0964\u0965\u1362"  # a space has to follow
_FULL_WIDTH_END = "\u3002\uff01\uff1f\uff61\uff0e"
_START = re.compile(
    r"\n[^\S\n]*(?=\S)"
    rf"|(?<=[{_END}])(?P<closing>{_CLOSING})[^\S\n]+(?={_OPENING}(?P<next>\w))"
    rf"|(?<=[{_FULL_WIDTH_END}])(?![{_FULL_WIDTH_END}])(?P<quote>{_CLOSING})[^\S\n]*(?=[^\s{_FULL_WIDTH_END}])"
)
_WORD_BEFORE = re.compile(r"(\w+)\.$")
_ABBREVIATIONS = {
    *(
        "mr",
        "mrs",
        "ms",
        "dr",
        "st",
        "gen",
        "col",
        "messrs",
        "prof",
        "hon",
        "rev",
        "capt",
        "lt",
        "jr",
        "sr",
        "vs",
        "no",
    ),
    *("nr", "fig", "vol", "pp", "ca", "vgl", "bzw", "hr", "fr", "mme", "mlle"),
}
_GERMAN_NOUN = re.compile(
    r"\s*(?:Jan|Feb|März|April|Mai|Juni|Juli|Aug|Sept|Okt|Nov|Dez|Jahrhundert|Jh|Kapitel|Auflage|Band|Tag|Mal\b)"
)
_HIRAGANA = re.compile("[\u3041-\u309f]")


def sentence_starts(text: str) -> list[int]:
    """The offsets of the sentences of a text after the first."""
    return [match.end() for match in _START.finditer(text) if _is_start(text, match)]


def _is_start(text: str, match: re.Match[str]) -> bool:
    if match["next"] is not None:
        return not match["next"].islower() and not (text[match.start() - 1] == "." and _abbreviates(text, match))
    # In Japanese the sentence continues after a quotation: 「...。」と
    return not (match["quote"] and _HIRAGANA.match(text, match.end()))


def _abbreviates(text: str, match: re.Match[str]) -> bool:
    """Whether the full stop before the match belongs to an abbreviation or an ordinal number."""
    match_before = _WORD_BEFORE.search(text, max(0, match.start() - 12), match.start())
    if match_before is None or match["closing"]:
        return False
    word = match_before[1]
    if word.isdigit():
        return len(word) <= 2 and _GERMAN_NOUN.match(text, match.end()) is not None
    return (len(word) == 1 and word.isascii()) or word.lower() in _ABBREVIATIONS
