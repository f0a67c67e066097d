"""Plain decoding: the model's own distribution, with the counters that every method has."""

from __future__ import annotations

from revisit.decoding.method import Method, Step
from revisit.forward.passes import Passes
from revisit.forward.prompt import Prompt


class Greedy(Method):
    """Decode plainly: greedy, sampling or beams, by the generation settings."""

    name = "greedy"
    summary = "the model's own distribution, unchanged"
    cost = "1×"
    source = "—"
    speculative = True

    def begin(self, prompt: Prompt, passes: Passes) -> Step:
        return lambda input_ids, logits: logits
