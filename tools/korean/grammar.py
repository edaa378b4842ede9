"""Korean particles and endings: ``with_particle("삽", "으로")`` is 삽으로, ``with_ending("돕다", "었다")`` 도왔다."""

from __future__ import annotations

_FIRST = 0xAC00
_TAILS = ["", *"ㄱㄲㄳㄴㄵㄶㄷㄹㄺㄻㄼㄽㄾㄿㅀㅁㅂㅄㅅㅆㅇㅈㅊㅋㅌㅍㅎ"]
_VOWELS = "ㅏㅐㅑㅒㅓㅔㅕㅖㅗㅘㅙㅚㅛㅜㅝㅞㅟㅠㅡㅢㅣ"
_LEADS = "ㄱㄲㄴㄷㄸㄹㅁㅂㅃㅅㅆㅇㅈㅉㅊㅋㅌㅍㅎ"

# After a consonant and after a vowel. Other particles have one form.
_PARTICLES = {
    form: (form, other)
    for form, other in (
        *(("은", "는"), ("이", "가"), ("을", "를"), ("과", "와"), ("으로", "로"), ("이나", "나"), ("아", "야")),
        *(("이라고", "라고"), ("이라는", "라는"), ("이었다", "였다")),
    )
}

# Stems whose last consonant does not change before a vowel, although that of most stems like them does.
_REGULAR_B = ("입", "잡", "뽑", "씹", "접", "집", "좁", "업", "꼽")
_REGULAR_REU = ("따르", "들르", "치르")
_CHANGING_D = ("걷", "듣", "싣", "깨닫", "긷")
_CHANGING_S = ("짓", "낫", "붓", "젓", "잇")
_STEADY_D = ("빨래를 걷",)  # to take in the washing, unlike to walk

# The last words that are adjectives, whose present has no 는.
_ADJECTIVES = """
가깝다 가늘다 가렵다 겸손하다 고맙다 고소하다 곱다 구수하다 기쁘다 길다 깊다 꼼꼼하다 날카롭다 높다 다르다 단단하다 달다 달콤하다 담백하다 덥다 따뜻하다
뜨겁다 매콤하다 맑다 맵다 멀다 무덥다 밝다 반갑다 부드럽다 부지런하다 빠르다 뿌듯하다 서늘하다 성실하다 시원하다 신기하다 신선하다 싱싱하다
아프다 없다 얼큰하다 용감하다 우렁차다 은은하다 이다 있다 정직하다 즐겁다 짭짤하다 쫄깃하다 춥다 친절하다 침착하다 크다 탐스럽다 편안하다 행복하다 행성이다 힘차다
"""
ADJECTIVES = frozenset(_ADJECTIVES.split())


def _split(syllable: str) -> tuple[str, str, str]:
    code = ord(syllable) - _FIRST
    return _LEADS[code // 588], _VOWELS[code // 28 % 21], _TAILS[code % 28]


def _joined(lead: str, vowel: str, tail: str = "") -> str:
    return chr(_FIRST + (_LEADS.index(lead) * 21 + _VOWELS.index(vowel)) * 28 + _TAILS.index(tail))


def _tail(text: str) -> str:
    return _split(text[-1])[2]


def _with_tail(text: str, tail: str) -> str:
    """The text with another final consonant."""
    return text[:-1] + _joined(*_split(text[-1])[:2], tail)


def particle(word: str, form: str) -> str:
    """The form of a particle after a word, given by its form after a consonant: 은, 이, 을, 과, 으로 ..."""
    if form not in _PARTICLES:
        return form
    tail = _tail(word)
    return _PARTICLES[form][not tail or (form == "으로" and tail == "ㄹ")]


def with_particle(word: str, form: str) -> str:
    return word + particle(word, form)


def with_ending(predicate: str, ending: str) -> str:
    """A verb or an adjective, given by its dictionary form and perhaps preceded by other words, with an ending.

    Endings that begin with 었, 어, ㄹ, ㄴ or 습니다, with 다 or 는 (the present, which adjectives form otherwise), and
    면, 며, 려고, 러 are fitted to the stem; others are appended to it.
    """
    stem, adjective = predicate[:-1], predicate.split()[-1] in ADJECTIVES
    if ending.startswith("었"):
        return _with_tail(_infinitive(stem), "ㅆ") + ending[1:]
    if ending.startswith("어"):
        return _infinitive(stem) + ending[1:]
    if ending.startswith("ㄹ"):
        return _adnominal(stem, "ㄹ", "을") + ending[1:]
    if ending.startswith("ㄴ") or (ending.startswith("는") and adjective and stem[-1] not in "있없"):
        return _adnominal(stem, "ㄴ", "은") + ending[1:]
    if ending.startswith("는"):
        return (_with_tail(stem, "") if _tail(stem) == "ㄹ" else stem) + ending
    if ending.startswith("다"):
        return (stem if adjective else _present(stem)) + ending
    if ending.startswith("습니다"):
        return _with_tail(stem, "ㅂ") + ending[1:] if _tail(stem) in ("", "ㄹ") else stem + ending
    if ending in ("면", "며", "려고", "러"):
        changed = _before_vowel(stem)
        return changed + ending if _joins(stem, changed) else f"{changed}으{ending}"
    return stem + ending


def _present(stem: str) -> str:
    return _with_tail(stem, "ㄴ") if _tail(stem) in ("", "ㄹ") else stem + "는"


def _adnominal(stem: str, tail: str, syllable: str) -> str:
    changed = _before_vowel(stem)
    return _with_tail(changed, tail) if _joins(stem, changed) else changed + syllable


def _joins(stem: str, changed: str) -> bool:
    """Whether an ending is appended without 으."""
    return (_tail(changed) == "" and _tail(stem) != "ㅅ") or _tail(stem) == "ㄹ"


def _before_vowel(stem: str) -> str:
    """The stem before 으: 돕 -> 도우, 걷 -> 걸, 짓 -> 지."""
    tail = _tail(stem)
    if tail == "ㅂ" and not stem.endswith(_REGULAR_B):
        return _with_tail(stem, "") + "우"
    if stem.endswith(_CHANGING_D) and not stem.endswith(_STEADY_D):
        return _with_tail(stem, "ㄹ")
    return _with_tail(stem, "") if stem.endswith(_CHANGING_S) else stem


def _infinitive(stem: str) -> str:
    """The stem with 아 or 어, contracted: 가, 먹어, 마셔, 해, 불러, 도와."""
    lead, vowel, tail = _split(stem[-1])
    changed = _before_vowel(stem)
    if tail:
        if changed.endswith("우") and not stem.endswith("우") and tail == "ㅂ":
            return changed[:-1] + ("와" if stem.endswith(("돕", "곱")) else "워")
        return changed + ("아" if vowel in "ㅏㅗ" else "어")
    if stem.endswith("르") and not stem.endswith(_REGULAR_REU):
        light = _split(stem[-2])[1] in "ㅏㅗ"
        return _with_tail(stem[:-1], "ㄹ") + ("라" if light else "러")
    if vowel == "ㅡ":
        light = len(stem) > 1 and stem[-2] != " " and _split(stem[-2])[1] in "ㅏㅗ"
        return stem[:-1] + _joined(lead, "ㅏ" if light else "ㅓ")
    if stem.endswith("하"):
        return stem[:-1] + "해"
    contracted = {"ㅗ": "ㅘ", "ㅜ": "ㅝ", "ㅣ": "ㅕ", "ㅚ": "ㅙ"}.get(vowel)
    if contracted is not None:
        return stem[:-1] + _joined(lead, contracted)
    return stem if vowel in "ㅏㅓㅐㅔㅕ" else stem + "어"
