"""A decoding method with attention, beams and its own loop: penalize attention on a single word of the answer.

The score of a beam falls by the largest attention from its newest word to one of its earlier words. Without beams, decoding goes back a
few tokens when a word gets too much attention, and chooses the second-best token there.
"""

import torch
from torch import Tensor

from revisit import Method
from revisit.decoding.loop import Loop
from revisit.decoding.method import Step, StepResult
from revisit.forward.attention import Call
from revisit.forward.passes import Passes
from revisit.forward.prompt import Prompt


class AttentionPenalty(Method):
    weight: float = 1.0  # penalty of a beam for all attention on one word
    limit: float = 0.3  # decoding goes back if one word gets more attention than this
    back: int = 2  # number of tokens to go back
    times: int = 3  # go back at most this often

    name = "attention-penalty"
    summary = "penalize attention on a single word of the answer"

    def watch(self, prompt: Prompt, passes: Passes) -> Tensor:
        """Return the attention (rows,) on each row's most attended word of the answer, in any head; every forward updates it."""
        peak = torch.zeros(len(prompt.ids), device=prompt.ids.device)  # (rows,)
        start = prompt.ids.shape[1]

        def attention_hook(call: Call) -> None:
            if call.key.shape[2] > start + 1:
                answer = call.last_attention()[..., start:-1]  # (rows, heads, words before the newest)
                peak.copy_(answer.amax((1, 2)))

        passes.on_attention(attention_hook, layers=[prompt.parts.depth - 1])
        return peak

    def begin(self, prompt: Prompt, passes: Passes) -> Step:
        """Penalize each beam in transformers' own loop."""
        peak = self.watch(prompt, passes)
        paid = torch.zeros_like(peak)  # the penalty of each beam so far
        passes.on_reorder(lambda rows: paid.copy_(paid[rows]))

        def step(input_ids: Tensor, logits: Tensor) -> StepResult:
            penalty = self.weight * peak.maximum(paid) - self.weight * paid  # only what is new
            paid.copy_(peak.maximum(paid))
            return StepResult(logits - penalty[:, None], comparable=True)  # not normalized: the penalty would be lost

        return step

    def decode(self, prompt: Prompt, passes: Passes, loop: Loop) -> object:
        """Run transformers' loop with beams, and otherwise a loop that can go back."""
        if prompt.beams:
            return loop()
        peak, ids, rollbacks = self.watch(prompt, passes), prompt.ids, 0
        done = torch.zeros_like(peak, dtype=torch.bool)
        known: dict[int, Tensor] = {}  # length -> (rows, V) scores of the next token
        while True:
            known[ids.shape[1]] = loop.scores(ids, loop.forward(ids))
            target = ids.shape[1] - self.back
            if target in known and rollbacks < self.times and bool((peak > self.limit).all()):
                rollbacks += 1
                known[target] = known[target].scatter(1, ids[:, target, None], -torch.inf)
                ids, done = ids[:, :target], torch.zeros_like(done)
                loop.crop(target)
            token = known[ids.shape[1]].argmax(-1).masked_fill(done, prompt.config.pad_token_id or 0)
            ids = torch.cat([ids, token[:, None]], dim=1)
            done |= loop.ended(ids)
            if bool(done.all()):
                return ids
