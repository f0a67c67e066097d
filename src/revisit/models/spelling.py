"""How a tokenizer spells names: which token would complete one after a text.

A name may be spelled in any way: by one token, by several, with a capital, after a bracket. So a text is followed by its characters:
the state after it is the beginning of a name that it ends with. A token completes a name if, after that beginning, it ends one that
starts at the beginning of a word ("snow" + "board", "hot" + " dog"; in "hot dog" the longer name counts).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from revisit.errors import RevisitError
from revisit.models.names import Categories, Names, names_of
from revisit.models.tokens import vocabulary_texts, word_tokens

if TYPE_CHECKING:
    from revisit.models.types import Tokenizer

_STARTS = re.compile(r"(?<!\w)\w")


@dataclass(frozen=True)
class Place:
    """Where a text ends.

    Attributes:
        start: The beginning of a name that the text ends with; empty if there is none.
        fresh: Whether a word could begin here.
        ended: The category of a name that ends here, unless the next token continues the word.
        open: Whether that name is withheld, so that the next token must continue the word.
    """

    start: str = ""
    fresh: bool = True
    ended: str | None = None
    open: bool = False


class Spelling:
    """The spellings of a list of names by a tokenizer.

    Raises:
        RevisitError: The tokenizer cannot begin a name, or all names of two categories begin with the same tokens.
    """

    def __init__(self, tokenizer: Tokenizer, categories: Categories) -> None:
        self.names: Names = names_of(categories)
        self.texts = [text.lower() for text in vocabulary_texts(tokenizer)]
        self._ids: dict[str, list[int]] = defaultdict(list)  # text without what follows the last word -> tokens
        for token, text in enumerate(self.texts):
            self._ids[re.sub(r"\W+$", "", text)].append(token)
        self.first_tokens = self._first_tokens(tokenizer, own_list=bool(categories))
        self.read_tokens = sorted({token for tokens in self.first_tokens.values() for token in tokens})
        self._completing: dict[tuple[str, bool], dict[int, str]] = {}  # place -> token -> category
        self._extended = self._find_extended(tokenizer)
        self._begun: dict[str, set[str]] = defaultdict(set)  # first words of names -> categories
        for form, category in self.names.of.items():
            for space in re.finditer(" ", form):
                self._begun[form[: space.start()]].add(category)
        ends = [token for token, text in enumerate(self.texts) if not re.match(r"\w", text)]
        self._ends_word = torch.tensor(ends)
        self.place = lru_cache(1 << 16)(self._place)
        self.blocked = lru_cache(1 << 10)(self._blocked)

    def _first_tokens(self, tokenizer: Tokenizer, own_list: bool) -> dict[str, list[int]]:
        """Return the tokens whose probability is the support of each category.

        These are its names of one token; where it has none, the first tokens of its names.
        """
        found: dict[str, list[int]] = {}
        known: dict[tuple[int, ...], str] = {}
        spelled: dict[str, list[list[int]]] = {category: [] for category in self.names.categories}
        for form, category in self.names.of.items():
            tokens = [token for token in word_tokens(tokenizer, form) if token != tokenizer.unk_token_id]
            tokens = [token for token in tokens if re.search(r"\w", self.texts[token])]  # not a lone mark or a byte
            if tokens:
                spelled[category].append(tokens)
            elif own_list and form in self.names.categories[category]:
                raise RevisitError(
                    f"The model's tokenizer cannot begin the name {form!r} with one of its tokens: remove it from the list."
                )
        for category, forms in spelled.items():
            if not forms:
                continue  # the model cannot write any of CHAIR's names for it
            whole = [tokens[0] for tokens in forms if len(tokens) == 1]
            found[category] = sorted({*(whole or [tokens[0] for tokens in forms])})
            other = known.setdefault(tuple(found[category]), category)
            if own_list and other != category:
                raise RevisitError(
                    f"The names {other!r} and {category!r} cannot be told apart, because they begin with the same token: join their "
                    "lines, or add a synonym to one of them."
                )
        return found

    def support(self, of_tokens: Mapping[int, tuple[float, int]]) -> dict[str, float]:
        """Return the support of each category, the best of its names, from that of `read_tokens`."""
        return {
            category: max(of_tokens[token][0] for token in tokens) for category, tokens in self.first_tokens.items()
        }

    def _find_extended(self, tokenizer: Tokenizer) -> dict[str, list[str]]:
        """Return the longer names of which a name is the first piece, as "bow" is of "bowl" in some vocabularies."""
        longer: dict[str, list[str]] = defaultdict(list)
        for form in self.names.of:
            tokens = word_tokens(tokenizer, form)
            for end in range(1, len(tokens)):
                piece = "".join(self.texts[token] for token in tokens[:end]).strip()
                if piece in self.names.of and form.startswith(piece) and form[len(piece)].isalnum():
                    longer[piece].append(form)
        return longer

    # -- following a text -------------------------------------------------------------------------------------------

    def _place(self, place: Place, token: int) -> tuple[Place, tuple[str, ...]]:
        """Return where a text ends after one more token, and the categories of the names that are known to be complete."""
        own = self.texts[token] if token < len(self.texts) else ""  # a model's vocabulary may be padded
        text = place.start + own
        if not own:  # a special token
            return Place(), () if place.ended is None else (place.ended,)
        continues = bool(re.match(r"\w", own))
        before = () if place.ended is None or continues else (place.ended,)
        found = [(form, end) for form, end in self._names_in(place, text) if end > len(place.start)]
        last = next((form for form, end in found if end == len(text)), None)
        complete = (self.names.of[form] for form, end in found if end < len(text))
        start = next((text[at:] for at in self._word_starts(place, text) if text[at:] in self.names.starts), "")
        ended = None if last is None else self.names.of[last]
        return Place(start, not re.search(r"\w$", text), ended), (*before, *complete)

    def _word_starts(self, place: Place, text: str) -> Iterator[int]:
        first = bool(place.start or place.fresh)
        return (found.start() for found in _STARTS.finditer(text) if found.start() or first)

    def _names_in(self, place: Place, text: str) -> Iterator[tuple[str, int]]:
        """Yield the names in a text that begins at a place, and where each ends; of names that overlap, the longest first one."""
        after = 0
        for at in self._word_starts(place, text):
            ends = (end for end in range(len(text), at, -1) if end == len(text) or not re.match(r"\w", text[end]))
            form = next((text[at:end] for end in ends if text[at:end] in self.names.of), None)
            if form is not None and at >= after:
                after = at + len(form)
                yield form, after

    # -- withholding ------------------------------------------------------------------------------------------------

    def completing(self, start: str, fresh: bool) -> dict[int, str]:
        """Map each token that would complete a name at a place to the name's category."""
        if (start, fresh) not in self._completing:
            place, found = Place(start, fresh), {}
            if not start:
                tokens: Sequence[int] = range(len(self.texts))
            else:
                found = dict(self.completing("", fresh))
                rests = [form[len(start) :] for form in self.names.of if form.startswith(start) and form != start]
                tokens = [token for rest in rests for token in self._ids.get(rest, ())]
            for token in tokens:
                text = start + self.texts[token]
                names = [form for form, end in self._names_in(place, text) if end > len(start)]
                if names:
                    found[token] = self.names.of[names[0]]
            self._completing[start, fresh] = found
        return self._completing[start, fresh]

    def longer(self, start: str, token: int) -> set[str]:
        """Return the categories of longer names of which a token that completes a name is also a piece."""
        text = (start + self.texts[token]).strip()
        return {self.names.of[form] for form in self._extended.get(text, ())}

    def begun(self, words: str) -> set[str]:
        """Return the categories of the names that go on after these words; none if the words are a name themselves."""
        return set() if words in self.names.of else self._begun.get(words, set())

    def leaves(self, place: Place, token: int, after: Place) -> bool:
        """Return whether a token ends the word at a place without going on with a name of several words."""
        word_ends = not re.match(r"\w", self.texts[token])
        return word_ends and not (after.start.startswith(place.start) and len(after.start) > len(place.start))

    def _blocked(self, place: Place, withheld: frozenset[str], dead_ends: frozenset[str] = frozenset()) -> Tensor:
        """Return the tokens that would write a withheld name at a place, or the first words that led to none before."""
        tokens = [
            token
            for token, category in self.completing(place.start, place.fresh).items()
            if category in withheld and self.longer(place.start, token) <= withheld
        ]
        for words in dead_ends:
            rest = words.removeprefix(place.start) if place.start else ""
            texts = (f" {words}", words if place.fresh else "", rest if rest != words else "")
            tokens += [token for text in texts if text for token in self._ids.get(text, ())]
        blocked = torch.tensor(sorted({*tokens}), dtype=torch.long)
        return torch.cat([blocked, self._ends_word]).unique() if place.open else blocked


KEPT = 8  # lists of names for which a tokenizer's spellings are kept; every request of a server may send its own
_SPELLINGS: WeakKeyDictionary[Tokenizer, dict[Categories, Spelling]] = WeakKeyDictionary()


def spelling_of(tokenizer: Tokenizer, categories: Categories = ()) -> Spelling:
    """Return the spellings of a list of names; a tokenizer's last `KEPT` lists are kept."""
    known = _SPELLINGS.setdefault(tokenizer, {})
    spelling = known.pop(categories, None) or Spelling(tokenizer, categories)
    known[categories] = spelling  # the last one
    for oldest in list(known)[:-KEPT]:
        known.pop(oldest, None)
    return spelling
