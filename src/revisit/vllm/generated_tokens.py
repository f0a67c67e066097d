"""The tokens that requests have generated so far, on the device, for the settings `once` and `phase`.

Every generated token is an input of the next step, so tokens are copied from the inputs: with asynchronous scheduling the host
does not have them yet.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from revisit.step.interface import to_device


class GeneratedTokens:
    """The tokens of each answer in a slot of its own; what follows the end of an answer is stale."""

    def __init__(self, device: torch.device) -> None:
        self.tokens = torch.zeros(1, 256, dtype=torch.long, device=device)  # (slots, length)
        self._free = [0]

    def take_slot(self) -> int:
        """Return a free slot."""
        if not self._free:
            slots = len(self.tokens)
            self._free = list(range(slots, 2 * slots))
            self.tokens = pad(self.tokens, (0, 0, 0, slots))
        return self._free.pop()

    def free_slot(self, slot: int) -> None:
        """Free a slot that was taken."""
        self._free.append(slot)

    def store(self, inputs: Tensor, copies: Sequence[tuple[int, int, int, int]]) -> None:
        """Copy tokens from the inputs of a step.

        Args:
            inputs: (n,) the tokens of all requests.
            copies: For each answer (slot, first, source, count): the inputs from index `source` on are its tokens from
                number `first` on.
        """
        if not copies:
            return
        longest = max(first + count for _, first, _, count in copies)
        if longest > self.tokens.shape[1]:
            self.tokens = pad(self.tokens, (0, 2 * longest - self.tokens.shape[1]))
        length = self.tokens.shape[1]
        targets = np.concatenate([slot * length + first + np.arange(count) for slot, first, _, count in copies])
        sources = np.concatenate([source + np.arange(count) for _, _, source, count in copies])
        index = to_device(np.stack([targets, sources]), self.tokens.device)
        self.tokens.view(-1).index_copy_(0, index[0], inputs[index[1]].long())

    def read(self, slots: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """Return answers of these lengths, with -1 after their last token.  -> (slots, longest)"""
        index = to_device(np.array([slots, lengths]), self.tokens.device)
        tokens = self.tokens[index[0], : max(lengths)]
        numbers = torch.arange(tokens.shape[1], device=tokens.device)
        return tokens.masked_fill_(numbers >= index[1][:, None], -1)
