"""The names, patterns of answers and questions of corpus_tasks.py, written by hand."""

from __future__ import annotations

import re

PERSONS = [
    "Ahab",
    "Captain Ahab",
    "Starbuck",
    "Stubb",
    "Flask",
    "Queequeg",
    "Tashtego",
    "Daggoo",
    "Fedallah",
    "Pip",
    "Ishmael",
    "Peleg",
    "Captain Peleg",
    "Bildad",
    "Captain Bildad",
    "Father Mapple",
    "Elijah",
    "Jonah",
    "Perth",
    "Dough-Boy",
    "Peter Coffin",
    "Moby Dick",
    "Washington",
    "Jefferson",
    "Lincoln",
    "Roosevelt",
    "Truman",
    "Eisenhower",
    "Kennedy",
    "Nixon",
    "Reagan",
    "Clinton",
    "Grant",
    "Jackson",
    "Madison",
    "Monroe",
]
PLACES = [
    "United States",
    "America",
    "Great Britain",
    "England",
    "France",
    "Spain",
    "Mexico",
    "Cuba",
    "Russia",
    "Germany",
    "China",
    "Japan",
    "Canada",
    "Texas",
    "California",
    "New York",
    "Nantucket",
    "New Bedford",
    "Florida",
    "Louisiana",
    "Panama",
    "Nicaragua",
    "Europe",
    "Africa",
    "Asia",
    "Vietnam",
    "Korea",
    "Iraq",
    "Iran",
    "Afghanistan",
    "Israel",
    "Pacific",
    "Atlantic",
    "Mississippi",
    "Oregon",
    "Alaska",
    "Hawaii",
    "Philippines",
    "Puerto Rico",
    "Soviet Union",
    "Washington City",
    "District of Columbia",
    "Venezuela",
    "Brazil",
    "Chili",
    "Peru",
    "Turkey",
    "Persia",
    "Austria",
    "Italy",
]
BODIES = [
    "Congress",
    "Senate",
    "House of Representatives",
    "House",
    "Supreme Court",
    "Treasury",
    "Navy",
    "Army",
    "United Nations",
    "Cabinet",
    "Federal Reserve",
    "Post-Office Department",
    "War Department",
    "Department of State",
    "Social Security",
    "Government",
]

# The pattern of each kind of answer. A question is made of a passage with exactly one answer of exactly one kind.
_COUNTRIES = "Great Britain|England|France|Spain|Mexico|Cuba|Russia|Germany|China|Japan|Canada|Texas|California|Iraq"
_CREW = "Ahab|Starbuck|Stubb|Flask|Queequeg|Tashtego|Daggoo|Peleg|Bildad|Fedallah|Pip"
ANSWERS = {
    "year": re.compile(r"\b(?:1[789]|20)\d\d\b"),
    "money": re.compile(r"\$\d[\d,]*(?:\.\d+)?(?: (?:million|billion|trillion)s?)?"),
    "place": re.compile(rf"\b(?:{_COUNTRIES})\b"),
    "person": re.compile(rf"\b(?:{_CREW})\b"),
}
WORDINGS = {
    "year": ["In which year was it?", "Which year is named?", "What year does the passage name?"],
    "money": ["How much money was it?", "Which sum of money is named?", "How many dollars of money?"],
    "place": ["Which country was it?", "Which country is spoken of?", "What country or state is named?"],
    "person": ["Who was the sailor?", "Which sailor is spoken of?", "Who of the crew is the sailor?"],
}

_ISHMAEL = """
Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my purse, and nothing
particular to interest me on shore, I thought I would sail about a little and see the watery part of the world.
"""
_CATO = """
This is my substitute for pistol and ball. With a philosophical flourish Cato throws himself upon his sword; I
quietly take to the ship. There is nothing surprising in this.
"""
_CITY = """
There now is your insular city of the Manhattoes, belted round by wharves as Indian isles by coral reefs. Right and
left, the streets take you waterward. Its extreme downtown is the battery.
"""
_SHROUD = """
Now small fowls flew screaming over the yet yawning gulf; a sullen white surf beat against its steep sides; then all
collapsed, and the great shroud of the sea rolled on as it rolled five thousand years ago.
"""
BY_HAND: dict[str, list[tuple[str, str | None]]] = {
    _ISHMAEL: [
        ("What is the narrator called?", "Ishmael"),
        ("What did the narrator want to see?", "the watery part of the world"),
        ("What had the narrator little of in his purse?", "money"),
        ("Which ship did the narrator choose?", None),
    ],
    _CATO: [
        ("Who throws himself upon his sword?", "Cato"),
        ("What does the narrator quietly take to?", "the ship"),
        ("How old was Cato?", None),
    ],
    _CITY: [
        ("Which city is belted round by wharves?", "the Manhattoes"),
        ("What is the extreme downtown?", "the battery"),
        ("Who built the wharves?", None),
    ],
    _SHROUD: [
        ("What flew over the gulf?", "small fowls"),
        ("How long ago did the sea roll on like this?", "five thousand years ago"),
        ("Who saw the fowls?", None),
    ],
}
