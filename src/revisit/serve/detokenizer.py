"""Turn tokens into text that later tokens cannot change."""

from __future__ import annotations

from collections.abc import Callable, Sequence

LONGEST = 16  # tokens of one character; after more, its bytes are broken


class IncrementalDetokenizer:
    """The text of one answer as its tokens arrive, cut at the first stop text.

    `feed` returns the new text that is final. Bytes of unfinished characters and possible beginnings of a stop text are
    held back. Only the last tokens are decoded again: a token's text depends on the one before it.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        self.decode, self.stops = decode, tuple(stops)
        self.tokens: list[int] = []
        self.text = ""
        self.stopped = False
        self._held = ""  # decoded, and not yet part of the text
        self._start, self._read = 0, 0  # tokens[_start:_read] are decoded again for what follows them

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
        known = self.decode(self.tokens[self._start : self._read])
        new = self.decode(self.tokens[self._start :])[len(known) :]
        if final or (new and not new.endswith("\ufffd")) or len(self.tokens) - self._read > LONGEST:
            self._held += new
            self._start, self._read = self._read, len(self.tokens)
        text = self._held if self.text else self._held.lstrip()
        stops = [position for stop in self.stops if (position := text.find(stop)) >= 0]
        end = min(stops, default=len(text))
        if stops:
            self.stopped = True
        elif not final:
            end = len(text.rstrip()) - self._stop_prefix(text.rstrip())  # an answer does not end in a space
        released = text[:end].rstrip()
        self._held = text[len(released) :]
        self.text += released
        return released

    def _stop_prefix(self, text: str) -> int:
        """Return the length of the longest suffix of the text that a stop text begins with."""
        begun = (size for stop in self.stops for size in range(1, len(stop)) if text.endswith(stop[:size]))
        return max(begun, default=0)
