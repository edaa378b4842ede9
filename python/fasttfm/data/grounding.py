"""``Grounder``: finds the concepts of a vocabulary in text of any language.

Words are matched as written or, in English and Korean, by their base forms. Inflection rules and a short list of
irregular forms propose base forms, and the vocabulary selects among them, as in WordNet's morphy. Nothing needs to be
installed or downloaded, and a wrong proposal ("bus" -> "bu") does no harm because no concept has that name. In scripts
without spaces, such as Chinese characters, each character is a word, and concepts are runs of them.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence

from fasttfm.data.korean_forms import is_hangul, korean_forms

_APOSTROPHES = "'\u2019-"
# Scripts without spaces: Thai, Lao, Burmese, Khmer, kana, Chinese characters.
_WITHOUT_SPACES = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)
_VOWELS = "aeiou"

_IRREGULAR = {
    form: base
    for base, forms in {
        "be": "am is are was were been being",
        "become": "became",
        "begin": "began begun",
        "bite": "bit bitten",
        "blow": "blew blown",
        "break": "broke broken",
        "bring": "brought",
        "build": "built",
        "burn": "burnt",
        "buy": "bought",
        "catch": "caught",
        "child": "children",
        "choose": "chose chosen",
        "come": "came",
        "cut": "cut",
        "dig": "dug",
        "do": "does did done",
        "draw": "drew drawn",
        "drink": "drank drunk",
        "drive": "drove driven",
        "eat": "ate eaten",
        "fall": "fell fallen",
        "feed": "fed",
        "feel": "felt",
        "fight": "fought",
        "find": "found",
        "fly": "flew flown flies",
        "foot": "feet",
        "forget": "forgot forgotten",
        "freeze": "froze frozen",
        "get": "got gotten",
        "give": "gave given",
        "go": "goes went gone",
        "good": "better best",
        "goose": "geese",
        "grow": "grew grown",
        "half": "halves",
        "hang": "hung",
        "have": "has had",
        "hear": "heard",
        "hide": "hid hidden",
        "hold": "held",
        "keep": "kept",
        "knife": "knives",
        "know": "knew known",
        "leaf": "leaves",
        "learn": "learnt",
        "leave": "left",
        "lie": "lay lain lying",
        "life": "lives",
        "light": "lit",
        "loaf": "loaves",
        "lose": "lost",
        "make": "made",
        "man": "men",
        "meet": "met",
        "mouse": "mice",
        "ox": "oxen",
        "pay": "paid",
        "person": "people",
        "ride": "rode ridden",
        "ring": "rang rung",
        "rise": "rose risen",
        "run": "ran",
        "say": "said",
        "see": "saw seen",
        "sell": "sold",
        "send": "sent",
        "sew": "sewn",
        "shake": "shook shaken",
        "sheep": "sheep",
        "shelf": "shelves",
        "shine": "shone",
        "shoot": "shot",
        "show": "shown",
        "sing": "sang sung",
        "sit": "sat",
        "sleep": "slept",
        "speak": "spoke spoken",
        "spend": "spent",
        "steal": "stole stolen",
        "stick": "stuck",
        "sweep": "swept",
        "swim": "swam swum",
        "take": "took taken",
        "teach": "taught",
        "tear": "tore torn",
        "tell": "told",
        "thief": "thieves",
        "think": "thought",
        "throw": "threw thrown",
        "tooth": "teeth",
        "wake": "woke woken",
        "wear": "wore worn",
        "wife": "wives",
        "win": "won",
        "wolf": "wolves",
        "woman": "women",
        "write": "wrote written",
    }.items()
    for form in forms.split()
}

# Words that are not concepts by themselves, although ConceptNet has nodes for them.
_STOP_WORDS = """
    a about all also am an and another any are as at be been being both but by can could did do does doing done each
    either else for from had has have having he her here him his how i if in into is it its just like may me might more
    most much must my no nor not of off on once one only or other our out over own same shall she should so some
    something such than that the their them then there these they this those through to too under until up upon us use
    very was we were what when where which while who whom whose why will with would you your
    이 그 저 것 수 때 등 및 더 안 못 잘 왜 한 두 세
"""
STOP_WORDS = frozenset(_STOP_WORDS.split())


def base_forms(word: str) -> Iterator[str]:
    """The word, and the words that it may be an inflected form of, the most likely first."""
    yield word
    if is_hangul(word):
        yield from korean_forms(word)
    elif word.isascii():
        yield from _english_forms(word)


def _english_forms(word: str) -> Iterator[str]:
    if word in _IRREGULAR:
        yield _IRREGULAR[word]
    if len(word) > 3 and word.endswith("s") and not word.endswith("ss"):
        if word.endswith("ies"):
            yield word[:-3] + "y"
        yield word[:-1]
        if word.endswith("es"):
            yield word[:-2]
    for ending in ("ing", "ed", "er", "est"):
        stem = word.removesuffix(ending)
        if stem == word or len(stem) < 2 or not any(letter in _VOWELS + "y" for letter in stem):
            continue
        if stem.endswith("i"):  # tried, happier
            yield stem[:-1] + "y"
        if len(stem) > 2 and stem[-1] == stem[-2] and stem[-1] not in _VOWELS:  # running
            yield stem[:-1]
        yield stem
        yield stem + "e"  # baking


def words_of(text: str) -> list[str]:
    """The text's words in lower case, without the 's of a genitive; each character of a script without spaces."""
    text = _WITHOUT_SPACES.sub(r" \g<0> ", unicodedata.normalize("NFC", text.lower()))
    kept = "".join(letter if _is_part(letter) else " " for letter in text.replace("--", " "))
    words = (word.strip(_APOSTROPHES) for word in kept.split())
    return [word.removesuffix("'s").removesuffix("\u2019s") for word in words if word]


def without_spaces(letter: str) -> bool:
    """Whether a character is of a script without spaces between words."""
    return _WITHOUT_SPACES.match(letter) is not None


def _is_part(letter: str) -> bool:
    """Whether a character can be a part of a word: a letter, a mark, a number, an apostrophe or a hyphen."""
    return unicodedata.category(letter)[0] in "LMN" or letter in _APOSTROPHES


class Grounder:
    """Finds the concepts of a vocabulary in texts.

    From left to right, the longest run of words that names a concept is taken; stop words by themselves name none.

    Args:
        concepts: The names of the vocabulary, with underscores between words, in the order of their numbers.
        longest: Concepts with more words are not found.
    """

    def __init__(self, concepts: Sequence[str], *, longest: int = 5) -> None:
        self._numbers: dict[tuple[str, ...], int] = {}
        self._sizes: dict[str, set[int]] = {}  # the numbers of words of the concepts that start with a word
        for number, concept in enumerate(concepts):
            words = tuple(words_of(concept.replace("_", " ")))
            if words and concept.count("_") < longest:
                self._numbers.setdefault(words, number)
                self._sizes.setdefault(words[0], set()).add(len(words))
        self._words = {word for words in self._numbers for word in words}

    def ground(self, text: str) -> list[int]:
        """The numbers of the text's concepts, each once, in their order."""
        words = words_of(text)
        concepts: dict[int, None] = {}
        index = 0
        while index < len(words):
            number, size = self._at(words, index)
            if number is not None:
                concepts[number] = None
            index += size
        return list(concepts)

    def _at(self, words: Sequence[str], index: int) -> tuple[int | None, int]:
        """The longest concept that starts at a word, and the number of its words; None and 1 if there is none."""
        firsts = self._forms(words[index])
        sizes = set(itertools.chain.from_iterable(self._sizes.get(word, ()) for word in firsts))
        for size in sorted(sizes, reverse=True):
            run = words[index : index + size]
            if len(run) < size or (size == 1 and run[0] in STOP_WORDS):
                continue
            number = self._named([firsts, *map(self._forms, run[1:])])
            if number is not None:
                return number, size
        return None, 1

    def _forms(self, word: str) -> list[str]:
        """The base forms of a word that concepts have."""
        return [form for form in dict.fromkeys(base_forms(word)) if form in self._words]

    def _named(self, forms: Iterable[Sequence[str]]) -> int | None:
        """The first concept that a combination of forms names; the written forms come first."""
        return next((self._numbers[words] for words in itertools.product(*forms) if words in self._numbers), None)
