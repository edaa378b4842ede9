"""``korean_forms``: the nouns and verbs of which a Korean word may be a form.

A noun is followed by particles (꽃이, 흙에서는), a verb's stem by endings, before which it may change (파다: 판, 팠다;
굽다: 구워). The forms are proposed by rules, and the vocabulary selects among them, as for English. The rules read a
word as letters (its NFD): of 판, the letters ㅍ ㅏ and a final ㄴ.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

_CASES = (
    "에서 에게서 에게 한테서 한테 께서 께 에 으로서 으로써 으로 로서 로써 로 와 과 하고 이랑 랑 의 처럼 같이 보다 "
    "만큼 까지 부터 마다 밖에 조차 마저 대로 만"
)
_TOPICS = "은 는 이 가 을 를 도 만 이나 나 이란 란 요"
_COPULAS = (
    "이다 다 이고 고 이며 며 이지만 이었다 였다 이었고 였고 입니다 인 일 이라고 라고 이라는 라는 이라면 라면 이면 면 "
    "이에요 예요 일까 인가 인지"
)


def _either(words: str) -> str:
    return "(?:" + "|".join(words.split()) + ")"


_PARTICLES = re.compile(f"들?{_either(_CASES)}{{0,2}}{_either(_TOPICS)}?{_either(_COPULAS)}?")

# Final consonants, as NFD has them: ㄴ, ㄹ, ㅂ, ㅆ.
_N, _L, _B, _SS = "\u11ab", "\u11af", "\u11b8", "\u11bb"
_AFTER_STEM = (  # endings that follow every stem
    "고 는 는다 는데 니 니까 던 지 지만 지요 자 기 기도 기는 기가 기를 기에 게 도록 네 네요 나요 거나 겠다 습니다 "
    "는지 다가 다"
)
_WITH_EU = "면 며 면서 러 려고 려면 니 니까 므로"  # after a consonant with 으
_AFTER_A = "서 야 도 요 라 서는 서도 지다 진다 졌다 진"  # after 아 or 어
_PAST = "다 고 는데 지만 습니다 어요 던 을 으면 으며 으니 는지 다가 다고 다는"


def _nfd(text: str) -> str:
    return unicodedata.normalize("NFD", text)


_ENDINGS = re.compile(  # that leave the stem as it is, or its ㄹ out
    _nfd(f"{_either(_AFTER_STEM)}|으?{_either(_WITH_EU)}|[은을]|은지|을까|을지")
    + f"|{_N}|{_N}{_nfd('다')}|{_N}{_nfd('지')}|{_N}{_nfd('다고')}|{_N}{_nfd('다는')}"
    + f"|{_L}|{_L}{_nfd('까')}|{_L}{_nfd('지')}|{_B}{_nfd('니다')}|{_B}{_nfd('니까')}"
)
_A_ENDINGS = re.compile(f"(?:{_nfd(_either(_AFTER_A))})?|{_SS}(?:{_nfd(_either(_PAST))})")  # after a stem with 아 or 어
# The vowels at the end of a stem with 아 or 어, and those that the stem may have.
_CONTRACTED = {"ᅧ": "ᅵ", "ᅪ": "ᅩ", "ᅯ": "ᅮ", "ᅫ": "ᅬ", "ᅢ": "ᅡ", "ᅡ": "ᅳ", "ᅥ": "ᅳ"}
_VOWELS = "".join(map(chr, range(0x1161, 0x1176)))
_FINALS = "".join(map(chr, range(0x11A8, 0x11C3)))


def is_hangul(word: str) -> bool:
    """Whether all letters of a composed word are syllables of Hangul."""
    return all("가" <= letter <= "힣" for letter in word)


def are_particles(text: str) -> bool:
    """Whether a text consists of particles that may follow a noun."""
    return _PARTICLES.fullmatch(text) is not None


def korean_forms(word: str) -> Iterator[str]:
    """The nouns of which the word may be a form, the longest first, then the verbs and adjectives with their 다."""
    for end in range(len(word) - 1, 0, -1):
        if _PARTICLES.fullmatch(word, end):
            yield word[:end]
    letters = _nfd(word)
    for end in range(len(letters), 1, -1):
        stem = letters[:end]
        if stem[-1] not in _VOWELS + _FINALS:
            continue
        if _ENDINGS.fullmatch(letters, end):
            yield from _verbs(stem)
        if _A_ENDINGS.fullmatch(letters, end):
            yield from _verbs_with_a(stem)


def _verbs(stem: str) -> Iterator[str]:
    """The verbs with this stem, or with one that has lost or changed its last consonant: 만드 -> 만들, 구우 -> 굽."""
    yield _verb(stem)
    if stem[-1] in _VOWELS:
        yield _verb(stem + "ᆯ")
        yield _verb(stem + "ᆺ")
    if stem.endswith((_nfd("우"), _nfd("오"))):
        yield _verb(stem[:-2] + "ᆸ")
    if stem.endswith("ᆯ"):
        yield _verb(stem[:-1] + "ᆮ")


def _verbs_with_a(stem: str) -> Iterator[str]:
    """The verbs whose stem with 아 or 어 is this: 먹어, 마셔, 그려, 써, 골라, 구워."""
    if stem.endswith((_nfd("아"), _nfd("어"))):
        yield from _verbs(stem[:-2])
    if stem.endswith((_nfd("라"), _nfd("러"))) and stem[-3:-2] == "ᆯ":
        yield _verb(stem[:-3] + _nfd("르"))
    if stem[-1] in _VOWELS:
        yield _verb(stem)
        if stem[-1] in _CONTRACTED:
            yield from _verbs(stem[:-1] + _CONTRACTED[stem[-1]])


def _verb(stem: str) -> str:
    return unicodedata.normalize("NFC", stem) + "다"
