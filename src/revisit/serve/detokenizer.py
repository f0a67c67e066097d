"""Turn tokens into text that later tokens cannot change."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class IncrementalDetokenizer:
    """The text of one answer as its tokens arrive, cut at the first stop text.

    `feed` returns the new text that is final. Bytes of unfinished characters and possible beginnings of a stop text are
    held back.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        self.decode, self.stops = decode, tuple(stops)
        self.tokens: list[int] = []
        self.text = ""
        self.stopped = False

    def feed(self, token: int) -> str:
        """Add a token; return the text that has become final."""
        self.tokens.append(token)
        return self._release(final=False)

    def finish(self) -> str:
        """Return the text that was held back; no token follows."""
        return self._release(final=True)

    def _release(self, *, final: bool) -> str:
        if self.stopped:
            return ""
        text = self.decode(self.tokens).lstrip()
        stops = [position for stop in self.stops if (position := text.find(stop)) >= 0]
        if stops:
            self.stopped, text = True, text[: min(stops)]
        elif not final:
            text = text.rstrip("\ufffd").rstrip()  # held back until the next word: an answer does not end in a space
            text = text[: len(text) - self._stop_prefix(text)].rstrip()
        else:
            text = text.rstrip()
        new = text[len(self.text) :] if text.startswith(self.text) else ""
        self.text += new
        return new

    def _stop_prefix(self, text: str) -> int:
        """Return the length of the longest suffix of the text that a stop text begins with."""
        begun = (size for stop in self.stops for size in range(1, len(stop)) if text.endswith(stop[:size]))
        return max(begun, default=0)
