"""OPERA: the released code's tokens, a plain re-computation of its rules, its beam search, families and errors."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decoding_cases import counted, extended
from torch import Tensor

import families
import revisit
from revisit import OPERA, Method, RevisitError
from revisit.decoding.decode import decode
from revisit.decoding.loop import Loop
from revisit.decoding.settings import Decoding
from revisit.forward.passes import Passes
from revisit.forward.prompt import Prompt
from revisit.methods import opera
from revisit.paper import latency

RELEASED = json.loads((Path(__file__).parents[1] / "data" / "released" / "opera.json").read_text("utf-8"))
TEXT = "describe all of it now"
NO_END = families.VOCAB + 88  # an end of text that no model can write


@functools.cache
def sharper(family: str, factor: float) -> Any:
    """Build a model whose last layer attends to few tokens, so that searches roll back; it never predicts an image token."""
    model = copy.deepcopy(families.build(family)[0])
    model.model.language_model.layers[-1].self_attn.q_proj.weight.data.mul_(factor)
    names = ("image_token_id", "video_token_id", "vision_start_token_id")
    vision = [i for i in (getattr(model.config, name, None) for name in names) if i is not None]
    model.lm_head.register_forward_hook(lambda _m, _a, output: output.index_fill(-1, torch.tensor(vision), -60.0))
    return model


def prompt(family: str, *pictures: int) -> dict[str, Any]:
    images = [[families.image(number, (56, 28))] for number in pictures]
    return dict(families.inputs(family, [TEXT] * len(images), images))


def search(model: Any, inputs: dict[str, Any], method: OPERA, new: int, **options: Any) -> list[list[int]]:
    options = {"do_sample": False, "eos_token_id": NO_END, "pad_token_id": 0, "max_new_tokens": new, **options}
    output: Tensor = revisit.generate(model, **inputs, method=method, **options)
    return output[:, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize(
    "row",
    RELEASED,
    ids=lambda row: f"{row['family']}-{row['sharper']}-{row['picture']}-{row['end']}-{row['precision']}",
)
def test_the_released_code_token_for_token(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """With an end of text, without one, with rollbacks, and with attention in half precision, as it is shipped."""
    targets = []
    target = opera.Search._target
    monkeypatch.setattr(opera.Search, "_target", lambda *args: targets.append(target(*args)) or targets[-1])
    settings = {name: row[name] for name in ("beams", "candidates", "threshold")}
    method = OPERA.official(**settings, **({} if row["precision"] == "half" else {"precision": "float32"}))
    model = sharper(row["family"], row["sharper"])
    end = NO_END if row["end"] is None else row["end"]
    got = search(model, prompt(row["family"], row["picture"]), method, row["new"], eos_token_id=end)
    assert got == [row["tokens"]]
    assert len([step for step in targets if step is not None]) == row["returns"]


def test_the_released_scorer_counts_the_prompt() -> None:
    """Without the prompt, and with the end, longer answers score higher."""
    row = RELEASED[2]
    method = OPERA(beams=row["beams"], candidates=row["candidates"], threshold=row["threshold"])
    model = sharper(row["family"], row["sharper"])
    (got,) = search(model, prompt(row["family"], row["picture"]), method, row["new"], eos_token_id=row["end"])
    assert len(got) > len(row["tokens"])


# -- a plain re-computation: whole forwards with all attention, lists, one item ------------------------------------------


def run_model(model: Any, inputs: dict[str, Any], answers: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Return logits (rows, V) and the last layer's attention (rows, T, T): the maximum over heads, normalized."""
    rows, more = len(answers), torch.tensor(answers, dtype=torch.long)
    given = {name: value.repeat(rows, *[1] * (value.ndim - 1)) for name, value in inputs.items()}
    with torch.no_grad():
        output = model(**extended(given, more), output_attentions=True)
    most = output.attentions[-1].amax(1)
    return output.logits[:, -1].float(), most / most.sum(-1, keepdim=True)


def reference(model: Any, inputs: dict[str, Any], method: OPERA, new: int) -> list[int]:
    start, width = inputs["input_ids"].shape[1], method.beams
    image = (inputs["input_ids"][0] == model.config.image_token_id).nonzero().flatten()
    answers: list[list[int]] = [[] for _ in range(width)]
    totals = torch.tensor([0.0] + [-1e9] * (width - 1))
    past: list[Any] = []  # of each step: answers and totals before it, over-trusted columns, choices
    rollbacks: dict[int, int] = {}
    excluded: dict[int, list[tuple[int, int]]] = {}
    while len(answers[0]) < new:
        logits, _ = run_model(model, inputs, answers)
        tokens = logits.topk(method.candidates).indices
        scores, trusted = torch.full_like(logits, -999.0), torch.zeros(width, method.candidates, dtype=torch.long)
        for number in range(method.candidates):
            _, seen = run_model(model, inputs, [[*row, int(tokens[n, number])] for n, row in enumerate(answers)])
            for row in range(width):
                square = method.scale * seen[row, start:, start:]
                columns = torch.tensor([float(square[j:, j].prod()) for j in range(len(square))])
                penalties = (1e-7 * columns).half().float()
                trusted[row, number] = int(penalties.argmax())
                penalty = penalties.max() if len(square) > 10 else -seen[row, -1, image].sum()
                token = tokens[row, number]
                scores[row, token] = logits[row, token] - method.weight * penalty
        mine = trusted.mode(-1).values
        past.append([answers, totals, mine, []])
        column = int(mine.mode().values)
        counts = sum((columns == column).long() for _, _, columns, _ in past)
        place = next((p for p in (column + 1, column) if rollbacks.get(p, 0) < method.candidates), None)
        if bool((counts > method.threshold).all()) and column >= 10 and place is not None:
            rollbacks[place] = rollbacks.get(place, 0) + 1
            back = min(place, len(answers[0]) - 1)
            excluded[place] = [*excluded.get(place, []), *past[back][3]]
            excluded.pop(place + 1, None)
            answers, totals, past = past[back][0], past[back][1], past[: back + 1]
            logits, _ = run_model(model, inputs, answers)
            scores = logits.clone()
            for row, token in excluded[place]:
                scores[row, token] = logits[row].min()
        sums = (scores.log_softmax(-1) + totals[:, None]).flatten()
        totals, best = sums.topk(width)
        chosen = [(int(i) // logits.shape[1], int(i) % logits.shape[1]) for i in best]
        past[-1][3] = chosen
        answers = [[*answers[row], token] for row, token in chosen]
    return answers[0]


@pytest.mark.parametrize(("family", "factor", "pictures"), [("llava", 6.0, (0, 1)), ("qwen2_5_vl", 15.0, (1, 2))])
def test_every_row_of_a_batch_equals_a_plain_recomputation(
    family: str, factor: float, pictures: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Items that roll back to different places at different times."""
    rolled_back: list[int] = []  # items
    target = opera.Search._target
    monkeypatch.setattr(
        opera.Search, "_target", lambda self, item, *rest: rolled_back.append(item) or target(self, item, *rest)
    )
    model, method = sharper(family, factor), OPERA(beams=2, candidates=2, threshold=1)
    got = search(model, prompt(family, *pictures), method, 27)
    assert set(rolled_back) == {0, 1}
    model.set_attn_implementation("eager")
    try:
        want = [reference(model, prompt(family, picture), method, 27) for picture in pictures]
    finally:
        model.set_attn_implementation("sdpa")
    assert got == want


# -- its beam search alone: transformers' tokens and scores, also after stepping back ------------------------------------


class OwnBeams(Method):
    """Beam search by its own loop; after the third token it steps back once to the first and searches again."""

    back: bool = False

    name = "own-beams"

    def decode(self, prompt: Prompt, passes: Passes, loop: Loop) -> Any:
        beams, step, back = [opera.Beams.start(prompt)], 0, self.back
        while not bool(beams[step].done.all()):
            ids = beams[step].ids(prompt.ids)
            log_probs = loop.forward(ids).log_softmax(-1)
            beams[step + 1 :] = [beams[step].step(loop.scores(ids, log_probs), prompt, loop)]
            step += 1
            if back and step == 3:
                back, step = False, 1
                loop.crop(prompt.ids.shape[1])
            else:
                loop.reorder(beams[step].rows.flatten())
        return opera.best_answers(prompt, [beams[step]] * len(beams[step].done))


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llava", {"early_stopping": True}),
        ("qwen2_5_vl", {"early_stopping": "never", "length_penalty": 2.0}),
        ("llava", {"length_penalty": 0.0, "num_return_sequences": 3}),
        ("qwen2_5_vl", {"min_new_tokens": 5}),
    ],
    ids=str,
)
def test_the_search_is_transformers_own(family: str, options: dict[str, Any]) -> None:
    model, _ = families.build(family)
    inputs = families.inputs(family, ["what is it", "and what is this"], [[families.image(n)] for n in (1, 2)])
    options = {"max_new_tokens": 7, "num_beams": 4, "do_sample": False, "pad_token_id": 0, **options}
    options |= {"eos_token_id": [2, *range(50, 150)], "return_dict_in_generate": True, "output_scores": True}
    options["output_logits"] = True  # without which transformers returns no beam_indices
    want = model.generate(**inputs, **options)
    for back in (False, True):
        got = revisit.generate(model, **inputs, method=OwnBeams(back=back), **options)
        assert torch.equal(got.sequences, want.sequences)
        torch.testing.assert_close(got.sequences_scores, want.sequences_scores, atol=1e-4, rtol=1e-4)
        assert torch.equal(got.beam_indices, want.beam_indices)


def test_what_a_call_asks_for_is_there() -> None:
    """The score of an answer is the mean of its tokens' scores, found by the beams that it passed through."""
    model, _ = families.build("llava")
    options = {"max_new_tokens": 14, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    asked = {f"output_{name}": True for name in ("scores", "logits", "hidden_states", "attentions")}
    method = OPERA(beams=3, threshold=1, scale=6)
    got = revisit.generate(model, **prompt("llava", 1, 2), method=method, **options, **asked)
    steps = got.sequences.shape[1] - prompt("llava", 1, 2)["input_ids"].shape[1]
    each = model.compute_transition_scores(got.sequences, got.scores, got.beam_indices)
    lengths = (got.beam_indices >= 0).sum(-1)
    torch.testing.assert_close(each.sum(-1) / lengths, got.sequences_scores, atol=1e-4, rtol=1e-4)
    assert {len(got.scores), len(got.logits), len(got.hidden_states), len(got.attentions)} == {steps}
    head = model.lm_head(got.hidden_states[steps - 1][-1][:, -1])
    torch.testing.assert_close(head, got.logits[-1], atol=1e-4, rtol=1e-4)
    assert "scores" not in revisit.generate(model, **prompt("llava", 1, 2), method=method, **options)


# -- counts, families, settings, errors ---------------------------------------------------------------------------------


def test_a_step_takes_one_forward_and_one_for_each_candidate() -> None:
    model, _ = families.build("llava")
    with counted(model) as rows:
        search(model, prompt("llava", 1, 2), OPERA(beams=3, candidates=4), 6)
    assert rows == [2 * 3] * 6 * (1 + 4)


@pytest.mark.parametrize("family", families.FAMILIES)
def test_every_family_is_searched_and_rows_do_not_depend_on_each_other(family: str) -> None:
    model, _ = families.build(family)
    method = OPERA(beams=2, candidates=2)
    if family in families.RECURRENT:
        with pytest.raises(RevisitError, match="OPERA needs the attention of every decoder layer, and only 1 of the 4"):
            search(model, prompt(family, 1), method, 2)
        return
    both = search(model, prompt(family, 1, 2), method, 4)
    assert both == [search(model, prompt(family, picture), method, 4)[0] for picture in (1, 2)]


def test_several_images_and_rows_without_one() -> None:
    model, processor = families.build("llava")
    texts = ["<image>what is it", "no image here"]
    inputs = dict(processor(text=texts, images=[[families.image(1)]], padding=True, return_tensors="pt"))
    got = search(model, inputs, OPERA(beams=3), 6)
    text = dict(processor(text=texts[1:], padding=True, return_tensors="pt"))
    plain = search(model, text, "greedy", 6, num_beams=3)  # type: ignore[arg-type]
    assert got[1] == plain[0]
    two = dict(families.inputs("llava", ["compare"], [[families.image(1), families.image(2)]]))
    assert len(search(model, two, OPERA(beams=2), 4)[0]) == 4


def test_columns_are_multiplied_from_their_own_row_on() -> None:
    attention = torch.tensor([[0.5, 0.0, 0.0], [0.2, 0.6, 0.0], [0.1, 0.4, 0.3]])
    products = torch.ones(1, 0)
    for row in range(3):
        products = opera.column_products(products, attention[None, row, : row + 1], 10.0)
    torch.testing.assert_close(products, torch.tensor([[5.0 * 2 * 1, 6.0 * 4, 3.0]]))
    penalties = opera.penalties(torch.tensor([0.2, 1.0, 24.0, 1e12]))
    assert penalties.tolist() == [0.0, *(1e-7 * torch.tensor([1.0, 24.0])).half().float().tolist(), float("inf")]
    assert [int(x) for x in opera.first_largest(torch.tensor([0.0, 0.0, 0.0]))] == [0, 0]
    assert opera.most_frequent(torch.tensor([[3, 1, 1, 3], [2, 5, 5, 0]])).tolist() == [1, 5]


def test_answers_of_a_batch_have_their_own_limits_and_callbacks() -> None:
    model, processor = revisit.load("tiny", device_map="cpu")
    images = [[families.image(1)], [families.image(2)]]
    inputs = revisit.prepare(processor, ["What is in the picture?"] * 2, images, device=model.device)
    streamed: list[tuple[int, int]] = []
    limits = [Decoding(max_new_tokens=4), Decoding(max_new_tokens=9)]
    found = decode(
        model, processor, inputs, OPERA(beams=3), limits, on_token=lambda *pair: streamed.append(pair) is not None
    )
    for number, limit in enumerate(limits):
        one = revisit.prepare(processor, ["What is in the picture?"], images[number : number + 1], device=model.device)
        (alone,) = decode(model, processor, one, OPERA(beams=3), [limit])
        assert (alone.tokens, alone.finish) == (found[number].tokens, found[number].finish)
        assert [token for row, token in streamed if row == number] == list(alone.tokens)
        assert len(alone.trace.rows) == 3


def test_every_token_may_be_the_end() -> None:
    model, _ = families.build("llava")
    inputs = prompt("llava", 1)
    ends = list(range(families.VOCAB))
    output = revisit.generate(model, **inputs, method=OPERA(beams=2), max_new_tokens=3, eos_token_id=ends)
    assert output.shape[1] == inputs["input_ids"].shape[1] + 1


def test_unsupported_calls_raise() -> None:
    model, _ = families.build("llava")
    inputs = prompt("llava", 1)
    with pytest.raises(RevisitError, match="turn sampling off"):
        revisit.generate(model, **inputs, method="opera", max_new_tokens=2, do_sample=True)
    with pytest.raises(RevisitError, match="remove the temperature"):
        decode(*families.build("llava"), inputs, OPERA(), [Decoding(temperature=0.5)])  # type: ignore[arg-type]
    with pytest.raises(RevisitError, match="has its own decoding loop; use it alone"):
        revisit.generate(model, **inputs, method="chain:methods=[opera,vcd]", max_new_tokens=2)
    with pytest.raises(RevisitError, match="uses beam search"):
        revisit.ask((model, families.build("llava")[1]), families.image(1), "what is it", method="opera")
    with pytest.raises(RevisitError, match="cannot be streamed"):
        revisit.generate(
            model, **prompt("llava", 1), method="opera", max_new_tokens=3, streamer=SimpleNamespace(put=print)
        )
    with pytest.raises(RevisitError, match=r"num_beams=5.*leave out cache_implementation"):
        revisit.generate(model, **inputs, method="opera", max_new_tokens=3, cache_implementation="static")
    with pytest.raises(RevisitError, match="use the default cache"):
        revisit.generate(model, **inputs, method="opera", num_beams=5, max_new_tokens=3, cache_implementation="static")
    with pytest.raises(RevisitError, match="has its own decoding loop, whose steps are not timed here"):
        latency.measure(model, inputs, {"opera": OPERA(beams=2)}, new_tokens=4, repeats=1)  # type: ignore[arg-type]
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    mask = inputs["input_ids"] == model.config.image_token_id
    with pytest.raises(RevisitError, match="needs the prompt as input_ids"):
        revisit.generate(model, inputs_embeds=embeds, vision_mask=mask, method="opera", max_new_tokens=2)


def test_its_settings_by_name() -> None:
    assert OPERA() == OPERA(beams=5, candidates=5, scale=50, weight=1, threshold=15, scorer="current")
    assert OPERA.official() == OPERA(scorer="released", precision="half")
    assert OPERA.fast() == OPERA.official(candidates=1, threshold=25)
    model, _ = families.build("llava")
    by_call = search(model, prompt("llava", 1), OPERA(beams=2), 4, num_beams=3)
    assert by_call == search(model, prompt("llava", 1), OPERA(beams=3), 4)
