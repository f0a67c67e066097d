"""The tokens that requests have generated so far, on the device, for the setting `once`.

Every generated token is an input of the next step, so tokens are copied from the inputs: with asynchronous scheduling the host
does not have them yet. Places behind the end of an answer may hold anything, such as rejected drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from revisit.step.interface import to_device


class Written:
    """One line of tokens for each request that needs them."""

    def __init__(self, device: torch.device) -> None:
        self.tokens = torch.zeros(1, 256, dtype=torch.long, device=device)  # (lines, places)
        self._free = [0]
        self._planned: list[tuple[int, int, int, int]] = []

    def take_line(self) -> int:
        """Return a free line."""
        if not self._free:
            lines, places = self.tokens.shape
            self._free = list(range(lines, 2 * lines))
            self._grow(2 * lines, places)
        return self._free.pop()

    def give_back(self, line: int) -> None:
        """Free a line."""
        self._free.append(line)

    def plan(self, line: int, place: int, source: int, count: int) -> None:
        """Plan to store `count` inputs from `source` on, from a place of a line on."""
        self._planned.append((line, place, source, count))

    def store(self, inputs: Tensor) -> None:
        """Store what was planned from the inputs of a step.  (tokens of the step,)"""
        planned, self._planned = self._planned, []
        if not planned:
            return
        longest = max(place + count for _, place, _, count in planned)
        if longest > self.tokens.shape[1]:
            self._grow(len(self.tokens), 2 * longest)
        width = self.tokens.shape[1]
        places = np.concatenate([line * width + place + np.arange(count) for line, place, _, count in planned])
        sources = np.concatenate([source + np.arange(count) for _, _, source, count in planned])
        index = to_device(np.stack([places, sources]), self.tokens.device)
        self.tokens.view(-1).index_copy_(0, index[0], inputs[index[1]].long())

    def of(self, lines: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """Return the first tokens of some lines, -1 behind the last.  -> (lines, longest)"""
        index = to_device(np.array([lines, lengths]), self.tokens.device)
        tokens = self.tokens[index[0], : max(lengths)]
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return tokens.masked_fill_(places >= index[1][:, None], -1)

    def _grow(self, lines: int, places: int) -> None:
        before, self.tokens = self.tokens, self.tokens.new_zeros(lines, places)
        self.tokens[: before.shape[0], : before.shape[1]] = before
