"""Find the codes and symptoms that a question in free words means, such as `my loss is nan`. Torch-free.

Every entry has words: its names, its title and the phrases of `said` in codes.toml. They are compared as stems, without
endings. The score of an entry is made of three things:

- weight: a word of the question counts more if fewer entries have it (as in TF-IDF);
- likeness: it counts less if it is only spelt like one of the entry's words;
- phrase: words that occur in one and the same phrase of the entry count up to twice as much.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher

MOST_FOUND = 5
# An entry with less than this share of the best score is not shown.
_NEAR = 0.6
# If no entry has this share of the question's weight, nothing is found.
_ENOUGH = 0.34
# Words count as alike from this length on, and from this similarity on (difflib's ratio).
_LETTERS, _ALIKE = 4, 0.82
# Words without a meaning of their own here.
_USUAL = """
a after again all am an and any are as at be been but by can cannot did do does doesn for from get gets
getting go goes going got had has have how i in is it its just keep keeps me my no not of off on or our out
over run runs running so still t than that the their then there this to too training train up very was we went
were what when where which why with without won you your
"""
_ENDINGS = ("ing", "es", "ed", "s")
_SHORTEST_STEM = 3


def found(question: str, words: Mapping[str, Sequence[str]]) -> list[str]:
    """Names of the entries that `question` may mean, the likeliest first; empty if none is near.

    words: name of an entry -> phrases by which people ask for it.
    """
    # How many entries have each word.
    entries: dict[str, set[str]] = {}
    frequency: Counter[str] = Counter()
    for name, phrases in words.items():
        entries[name] = set(_stems(" ".join(phrases)))
        frequency.update(entries[name])

    # For each word of the question: which words it may mean, and its weight.
    asked = list(dict.fromkeys(_stems(question)))
    likeness: dict[str, dict[str, float]] = {}
    weights: dict[str, float] = {}
    for word in asked:
        likeness[word] = _alike(word, frequency)
        weights[word] = _weight(frequency, likeness[word], len(entries))
    total = sum(weights.values())

    # Score of each entry: the weights of the words that it has.
    scores: dict[str, float] = {}
    for name, stems in entries.items():
        shares: list[float] = []
        for word in asked:
            # The entry's word that is most like this one.
            likes = [like for each, like in likeness[word].items() if each in stems]
            shares.append(weights[word] * max(likes, default=0.0))
        # Words of one phrase count more than the same words from several phrases.
        whole = max((_share(asked, phrase) for phrase in words[name]), default=0.0)
        scores[name] = sum(shares) * (1 + whole)

    # Nothing is better than an answer to another question.
    best = max(scores.values(), default=0.0)
    if not total or best < _ENOUGH * total:
        return []
    near = [name for name, score in scores.items() if score >= _NEAR * best]
    return sorted(near, key=lambda name: -scores[name])[:MOST_FOUND]


def _stems(text: str) -> list[str]:
    """The words of a text without their endings; usual words are left out."""
    parts = re.findall(r"[a-z0-9]+", text.lower())
    usual = _USUAL.split()
    return [_stem(part) for part in parts if part not in usual]


def _stem(word: str) -> str:
    for ending in _ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= _SHORTEST_STEM:
            return word.removesuffix(ending)
    return word


def _alike(word: str, known: Mapping[str, int]) -> dict[str, float]:
    """The known words that `word` may mean, and how much each counts: 1 for the word itself."""
    if word in known:
        return {word: 1.0}
    if len(word) < _LETTERS:
        return {}
    # Typing errors seldom change the first letter.
    found: dict[str, float] = {}
    for each in known:
        if len(each) < _LETTERS or each[0] != word[0]:
            continue
        ratio = SequenceMatcher(None, word, each).ratio()
        if ratio >= _ALIKE:
            found[each] = ratio * ratio
    return found


def _weight(frequency: Mapping[str, int], alike: Mapping[str, float], entries: int) -> float:
    """Weight of a word: larger if fewer entries have it. A word that no entry has weighs 1."""
    count = max((frequency[each] for each in alike), default=0)
    return math.log(1 + entries / count) if count else 1.0


def _share(asked: Sequence[str], phrase: str) -> float:
    """The share of common words among all words of question and phrase (Jaccard index)."""
    mine, theirs = set(asked), set(_stems(phrase))
    if not mine or not theirs:
        return 0.0
    return len(mine & theirs) / len(mine | theirs)
