"""The tokens that requests have generated so far, on the device, for the settings `once` and `phase`.

Every generated token is an input of the next step, so tokens are copied from the inputs: with asynchronous scheduling the host
does not have them yet. Rejected drafts may be behind the end of an answer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from revisit.step.interface import to_device


class Written:
    """One line of tokens for each request that needs them."""

    def __init__(self, device: torch.device) -> None:
        self.tokens = torch.zeros(1, 256, dtype=torch.long, device=device)  # (lines, length)
        self._free = [0]

    def take_line(self) -> int:
        """Return a free line."""
        if not self._free:
            lines = len(self.tokens)
            self._free = list(range(lines, 2 * lines))
            self.tokens = pad(self.tokens, (0, 0, 0, lines))
        return self._free.pop()

    def free_line(self, line: int) -> None:
        """Free a line that was taken."""
        self._free.append(line)

    def store(self, inputs: Tensor, copies: Sequence[tuple[int, int, int, int]]) -> None:
        """Copy tokens from the inputs of a step.

        Args:
            inputs: (tokens of the step,).
            copies: The line of an answer, the number of its first new token, the number of that token's input, and how many
                inputs follow each other.
        """
        if not copies:
            return
        longest = max(first + count for _, first, _, count in copies)
        if longest > self.tokens.shape[1]:
            self.tokens = pad(self.tokens, (0, 2 * longest - self.tokens.shape[1]))
        length = self.tokens.shape[1]
        targets = np.concatenate([line * length + first + np.arange(count) for line, first, _, count in copies])
        sources = np.concatenate([source + np.arange(count) for _, _, source, count in copies])
        index = to_device(np.stack([targets, sources]), self.tokens.device)
        self.tokens.view(-1).index_copy_(0, index[0], inputs[index[1]].long())

    def read(self, lines: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """Return the first tokens of some lines, -1 behind the last.  -> (lines, longest)"""
        index = to_device(np.array([lines, lengths]), self.tokens.device)
        tokens = self.tokens[index[0], : max(lengths)]
        numbers = torch.arange(tokens.shape[1], device=tokens.device)
        return tokens.masked_fill_(numbers >= index[1][:, None], -1)
