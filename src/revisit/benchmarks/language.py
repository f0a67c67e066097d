"""NLTK's tokeniser, tagger and lemmatiser behind two functions, with its data found or asked for in one sentence."""

from __future__ import annotations

import functools
from typing import Any

from revisit import settings
from revisit.errors import RevisitError

# package -> where nltk.data looks for it
PACKAGES = {
    "punkt_tab": "tokenizers/punkt_tab/english",
    "averaged_perceptron_tagger_eng": "taggers/averaged_perceptron_tagger_eng",
    "wordnet": "corpora/wordnet",
}


def _nltk() -> Any:
    try:
        import nltk
    except ImportError as error:
        raise RevisitError("This rule needs NLTK: pip install 'revisit-decoding[eval]'.") from error
    # NLTK reads NLTK_DATA once, at import; honour a value that was set later.
    for place in reversed(settings.nltk_folders()):
        if place not in nltk.data.path:
            nltk.data.path.insert(0, place)
    return nltk


def _present(nltk: Any, resource: str) -> bool:
    # A corpus may stay zipped; `find` opens "corpora/wordnet.zip/wordnet/" the way NLTK's own readers do.
    name = resource.rsplit("/", 1)[-1]
    for candidate in (resource, f"{resource}.zip/{name}/"):
        try:
            nltk.data.find(candidate)
            return True
        except LookupError:
            continue
    return False


def missing_packages() -> list[str]:
    """The NLTK data packages that cannot be found on this machine."""
    nltk = _nltk()
    return [package for package, resource in PACKAGES.items() if not _present(nltk, resource)]


def require_data() -> None:
    """Raises the sentence that says which NLTK data is missing and how to get it."""
    missing = missing_packages()
    if missing:
        raise RevisitError(
            f"NLTK data not found: {', '.join(missing)}. Run `python -m nltk.downloader {' '.join(missing)}`, or set NLTK_DATA to "
            "the folder that has it (`revisit score` can fetch it, with --download-nltk)."
        )


def download_data() -> list[str]:
    """Fetches what is missing with NLTK's own downloader (into NLTK's default place) and names it."""
    nltk = _nltk()
    missing = missing_packages()
    for package in missing:
        if not nltk.download(package, quiet=True):
            raise RevisitError(f"NLTK could not download {package!r}; check the network, or set NLTK_DATA to a copy.")
    require_data()
    return missing


@functools.cache
def _tools() -> tuple[Any, Any, Any]:
    nltk = _nltk()
    require_data()
    from nltk.stem import WordNetLemmatizer
    from nltk.tag import PerceptronTagger

    return nltk.word_tokenize, PerceptronTagger(), WordNetLemmatizer()


def tagged(text: str) -> list[tuple[str, str]]:
    """The tokens of `text` with their Penn Treebank tags."""
    tokenize, tagger, _ = _tools()
    result: list[tuple[str, str]] = tagger.tag(tokenize(text))
    return result


@functools.cache
def lemma(word: str, pos: str) -> str:
    """WordNet's lemma of `word` as a noun, verb, adjective or adverb (`pos` n, v, a, r)."""
    result: str = _tools()[2].lemmatize(word, pos)
    return result
