"""``fonts_for``: draws texts of any script with matplotlib, if a font of the system has their letters."""

from __future__ import annotations

import contextlib
import unicodedata
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

# Fonts with Hangul, and most of them with Chinese characters and kana, that systems and their packages have.
_PREFERRED = (
    *("Noto Sans CJK KR", "Noto Sans KR", "NanumGothic", "NanumBarunGothic", "Malgun Gothic", "Apple SD Gothic Neo"),
    *("AppleGothic", "Source Han Sans KR", "UnDotum", "Baekmuk Gulim", "Noto Serif CJK KR", "NanumMyeongjo"),
)
_reported: set[str] = set()  # the scripts that have no font, each of which is reported once


@contextlib.contextmanager
def fonts_for(texts: Iterable[str]) -> Iterator[None]:
    """A context in which matplotlib draws these texts with its default font and, for letters that it lacks, another
    one. If no font has them, a warning says once how to install one."""
    import matplotlib

    families = list(matplotlib.rcParams["font.family"])
    scripts: dict[str, set[str]] = {}
    for letter in _missing(families, {letter for text in texts for letter in text}):
        scripts.setdefault(unicodedata.name(letter, "unknown").split()[0].title(), set()).add(letter)
    found = {script: _family_with(letters) for script, letters in scripts.items()}
    for script, family in found.items():
        if family is None and script not in _reported:
            _reported.add(script)
            _report(script, scripts[script])
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcParams["font.family"] = [*families, *filter(None, found.values())]
        if None in found.values():  # which is reported
            warnings.filterwarnings("ignore", message=r"Glyph .* missing from", category=UserWarning)
        yield


def _missing(families: list[str], letters: set[str]) -> set[str]:
    """The letters that none of these fonts has."""
    from matplotlib import font_manager

    visible = {letter for letter in letters if not letter.isspace() and unicodedata.category(letter)[0] != "C"}
    for family in families:
        path = font_manager.findfont(font_manager.FontProperties(family=[family]))
        visible = {letter for letter in visible if not _has(path, {letter})}
    return visible


def _has(path: Any, letters: set[str]) -> bool:
    from matplotlib.font_manager import get_font

    try:
        font = get_font(path)
        return all(font.get_char_index(ord(letter)) for letter in letters)
    except (OSError, RuntimeError):  # a file that FreeType cannot open
        return False


def _family_with(letters: set[str]) -> str | None:
    """A font that has these letters: one of matplotlib's list, or one that was installed after the list was written."""
    from matplotlib import font_manager

    manager = font_manager.fontManager
    known = {entry.fname for entry in manager.ttflist}
    for path in font_manager.findSystemFonts():
        if path not in known:
            with contextlib.suppress(OSError, RuntimeError):
                manager.addfont(path)
    order = {name: number for number, name in enumerate(_PREFERRED)}
    plain = [entry for entry in manager.ttflist if not entry.name.startswith(("Last Resort", "LastResort"))]
    entries = sorted(plain, key=lambda entry: (order.get(entry.name, len(order)), entry.style != "normal", entry.name))
    return next((entry.name for entry in entries if _has(entry.fname, letters)), None)


def _report(script: str, letters: set[str]) -> None:
    how = "install one, or copy a .ttf file into ~/.local/share/fonts"
    if script in ("Hangul", "Cjk", "Hiragana", "Katakana"):
        how += ", for example: apt install fonts-noto-cjk, or for Korean fonts-nanum (NanumGothic.ttf)"
    some = "".join(sorted(letters)[:6])
    warnings.warn(f"no font has {some} ({script}), which the picture shows as boxes; {how}", stacklevel=5)
