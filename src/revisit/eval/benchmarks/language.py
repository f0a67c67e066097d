"""NLTK's tokenizer, tagger and lemmatizer, and its data.

A CHAIR score depends on the version of NLTK, so scores report it.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

from revisit import settings
from revisit.embedded.catalog import CATEGORIES, COLORS, PLACES
from revisit.errors import RevisitError, need
from revisit.words import FUNCTION_WORDS

LICENSE = "WordNet's own (Princeton University) for wordnet; for the others see https://www.nltk.org/nltk_data"
# package -> where nltk.data looks for it
PACKAGES = {
    "punkt_tab": "tokenizers/punkt_tab/english",
    "averaged_perceptron_tagger_eng": "taggers/averaged_perceptron_tagger_eng",
    "wordnet": "corpora/wordnet",
}


def _nltk() -> Any:
    need("nltk")
    import nltk

    # NLTK reads NLTK_DATA once, at import; add folders that were set later, and that of `revisit data get nltk`.
    for folder in reversed([*settings.nltk_folders(), str(data_folder())]):
        if folder not in nltk.data.path:
            nltk.data.path.insert(0, folder)
    return nltk


def data_folder() -> Path:
    """Return the folder that `revisit data get nltk` fills by default."""
    return settings.cache_folder() / "nltk_data"


def missing_packages() -> list[str]:
    """Return the NLTK data packages that are not on this machine; a corpus may stay zipped."""
    return [name for name, path in PACKAGES.items() if not (_exists(path) or _exists(f"{path}.zip/{name}/"))]


def _exists(resource: str) -> bool:
    try:
        return bool(_nltk().data.find(resource))
    except LookupError:
        return False


def require_data() -> None:
    """Raise RevisitError if NLTK data is missing."""
    if absent := missing_packages():
        raise RevisitError(
            f"NLTK data not found: {', '.join(absent)}. Run `revisit data get nltk`, or set NLTK_DATA to the folder that has it."
        )


def get_data(folder: Path) -> str:
    """Download the data into `folder` with NLTK's downloader, which verifies it; return NLTK's version."""
    nltk = _nltk()
    for package in PACKAGES:
        try:
            nltk.download(package, download_dir=str(folder), quiet=True, raise_on_error=True)
        except (ValueError, OSError) as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise RevisitError(
                f"NLTK could not download {package} into {folder} ({reason}); run the same command again, or set NLTK_DATA to a "
                "folder that has it."
            ) from error
    _tools.cache_clear()
    return str(nltk.__version__)


@functools.cache
def scene_lemmas() -> dict[str, str]:
    """Map each word of captions of generated scenes to NLTK's lemma, which is wrong for some: "vas" for vases."""
    phrases = " ".join([*COLORS, *(f"{place.name} {place.within}" for place in PLACES), "we see as well bottom"])
    plurals = {category.plural.split()[-1]: category.noun.split()[-1] for category in CATEGORIES}
    nouns = [word for category in CATEGORIES for word in category.noun.split()]
    return {word: word for word in [*FUNCTION_WORDS, *phrases.split(), *nouns]} | {
        **plurals,
        "people": "people",
        "skis": "ski",
        "teddybears": "teddybears",
        "vases": "vas",
    }


def parse_scene_caption(caption: str) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Return the tokens and lemmas of a lower-cased caption of a generated scene without NLTK; None for other captions."""
    tokens = tuple(re.findall(r"[a-z]+|[.,]", caption))
    known = scene_lemmas() | {".": ".", ",": ","}
    complete = "".join(tokens) == "".join(caption.split()) and all(token in known for token in tokens)
    return (tokens, tuple(known[token] for token in tokens)) if complete else None


def version() -> str:
    """Return a note for scores about how captions are parsed."""
    if missing_packages():
        return "Objects were found with a word list for generated scenes, because NLTK's data is not installed (`revisit data get nltk`)."
    return f"Words by NLTK {_nltk().__version__}."


@functools.cache
def _tools() -> tuple[Any, Any, Any]:
    nltk = _nltk()
    require_data()
    from nltk.stem import WordNetLemmatizer
    from nltk.tag import PerceptronTagger

    return nltk.word_tokenize, PerceptronTagger(), WordNetLemmatizer()


def tagged(text: str) -> list[tuple[str, str]]:
    """Return the tokens of `text` with their Penn Treebank tags."""
    tokenize, tagger, _ = _tools()
    result: list[tuple[str, str]] = tagger.tag(tokenize(text))
    return result


@functools.cache
def lemma(word: str, pos: str) -> str:
    """Return WordNet's lemma of `word` as a noun, verb, adjective or adverb (`pos` n, v, a, r)."""
    result: str = _tools()[2].lemmatize(word, pos)
    return result
