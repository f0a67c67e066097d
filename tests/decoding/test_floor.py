"""A floor on the support of names, in every way of decoding."""

import copy
from functools import cache

import pytest
import torch
from transformers import DynamicCache

import revisit
from revisit import Greedy, ReVisiT, RevisitError, Trace
from revisit.decoding.decode import decode
from revisit.decoding.settings import Decoding
from revisit.embedded.scenes import render, scene
from revisit.methods import as_method
from revisit.models.prompts import prepare
from revisit.models.spelling import Place, spelling_of
from revisit.words import WORDS, object_words

FLOOR = 0.5


@cache
def tiny():
    return revisit.load("tiny")


def scenes(count):
    return [render(scene("unusual", 31, number)) for number in range(count)]


def inputs(images):
    return prepare(tiny()[1], ["Describe the image."] * len(images), [[image] for image in images])


def named(text):
    return {WORDS[found.group(1).lower()] for found in object_words().finditer(text)}


def answers(method, images, **options):
    return decode(*tiny(), inputs(images), as_method(method, tiny()[0]), Decoding(max_new_tokens=64), **options)


def test_a_token_beyond_the_tokenizer_ends_a_word_like_a_special_one():
    spelling = spelling_of(tiny()[1].tokenizer, ReVisiT().names)
    begun, _ = spelling.place(Place(), tiny()[1].tokenizer.encode("dog", add_special_tokens=False)[0])
    assert spelling.place(begun, 10**6) == spelling.place(begun, tiny()[1].tokenizer.eos_token_id)


def test_without_a_floor_nothing_changes():
    plain, zero = (answers(method, scenes(3)) for method in (ReVisiT(), ReVisiT(floor=0)))
    assert [answer.tokens for answer in plain] == [answer.tokens for answer in zero]
    assert not zero[0].trace.rows[0].support
    assert "floor" not in ReVisiT(floor=0).settings()


@pytest.mark.parametrize("method", ["greedy", "revisit", "vcd", "chain:methods=[vcd;revisit]", "opera"])
def test_a_name_below_the_floor_is_never_written(method):
    images = scenes(1) if method == "opera" else scenes(4)
    free = answers(method, images)
    held = answers(f"{method},floor={FLOOR}" if ":" in method else f"{method}:floor={FLOOR}", images)
    for before, after in zip(free, held, strict=True):
        low = set(after.trace.rows[0].withheld)
        assert len(low) > 40
        assert not named(after.text) & low
        assert max(after.trace.rows[0].withheld.values()) < FLOOR
        if not named(before.text) & low and before.trace.rows[0].step_count == after.trace.rows[0].step_count:
            assert before.text == after.text
    assert method == "opera" or any(
        named(answer.text) & set(after.trace.rows[0].withheld) for answer, after in zip(free, held, strict=True)
    )


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"do_sample": True, "temperature": 1.5, "num_return_sequences": 3},
        {"prompt_lookup_num_tokens": 4},
        {"prefill_chunk_size": 40},
        {"cache_implementation": "static"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_every_loop_withholds(options):
    model, processor = tiny()
    torch.manual_seed(0)
    given, trace = inputs(scenes(1)), Trace()
    output = revisit.generate(model, **given, method=ReVisiT(floor=FLOOR), trace=trace, max_new_tokens=48, **options)
    for text, row in zip(revisit.generated_text(processor, output, given), trace.rows, strict=False):
        assert not named(text) & set(row.withheld)
        assert row.withheld


def test_drafts_and_chunks_change_no_token():
    given = inputs(scenes(1))
    first, *others = (
        revisit.generate(tiny()[0], **given, method=Greedy(floor=0.3), max_new_tokens=48, **how).tolist()
        for how in ({}, {"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 40})
    )
    assert all(other == first for other in others)


@pytest.mark.parametrize("method", ["greedy:floor=0.3", "revisit:floor=0.3"])
def test_a_row_alone_equals_the_row_in_a_batch(method):
    images = scenes(5)
    together = answers(method, images)
    for number, image in enumerate(images):
        (alone,) = answers(method, [image])
        assert alone.text == together[number].text
        assert alone.trace.rows[0].withheld == pytest.approx(together[number].trace.rows[0].withheld, abs=1e-5)
        assert alone.trace.rows[0].prevented == together[number].trace.rows[0].prevented


def test_a_caption_is_the_same_at_floors_above_the_lowest():
    for answer, image in zip(answers(f"greedy:floor={FLOOR}", scenes(5)), scenes(5), strict=True):
        lowest = answer.trace.rows[0].lowest_floor
        assert 0 <= lowest < FLOOR
        (above,) = answers(f"greedy:floor={lowest + 1e-4}", [image])
        assert above.text == answer.text


def test_a_second_question_reads_the_image_from_the_cache():
    model, given, kept = tiny()[0], inputs(scenes(1)), DynamicCache()
    method = ReVisiT(floor=FLOOR)
    first = revisit.generate(model, **given, method=method, past_key_values=kept, max_new_tokens=20)
    kept.crop(given["input_ids"].shape[1] - 1 - kept.get_seq_length())
    again = {name: value for name, value in given.items() if name != "pixel_values"}
    assert revisit.generate(model, **again, method=method, past_key_values=kept, max_new_tokens=20).equal(first)


def test_a_prompt_without_an_image_is_left_alone():
    processor = tiny()[1]
    given = prepare(processor, ["Describe a dog."], [[]])
    plain, held = (
        revisit.generate(tiny()[0], **given, method=Greedy(floor=floor), max_new_tokens=12) for floor in (0, 1)
    )
    assert plain.equal(held)


def test_another_processor_wins_and_is_counted():
    model, processor = tiny()
    (dog,) = processor.tokenizer.encode(" dog", add_special_tokens=False)
    trace, given = Trace(), inputs(scenes(1))
    output = revisit.generate(
        model, **given, method=Greedy(floor=1), trace=trace, max_new_tokens=3, prefix_allowed_tokens_fn=lambda *_: [dog]
    )
    assert output[0, -3:].tolist() == [dog] * 3
    assert trace.rows[0].overruled == 3


class OnlyDogs(revisit.Method):
    """Leave a single token."""

    token: int = 0
    name = "only-dogs"

    def begin(self, prompt, passes):
        def step(input_ids, logits):
            scores = torch.full_like(logits, -torch.inf)
            scores[:, self.token] = 0.0
            return scores

        return step


def test_a_method_that_leaves_withheld_names_only_is_decoded_plainly():
    model, processor = tiny()
    (dog,) = processor.tokenizer.encode(" dog", add_special_tokens=False)
    trace, given = Trace(), inputs(scenes(1))
    output = revisit.generate(model, **given, method=OnlyDogs(token=dog, floor=1), trace=trace, max_new_tokens=5)
    plain = revisit.generate(model, **given, method=Greedy(floor=1), max_new_tokens=5)
    assert output.equal(plain)
    assert trace.rows[0].exhausted == 5


def test_thoughts_are_free():
    model, processor = tiny()
    processor = copy.deepcopy(processor)
    words = [" room", " table"]
    opened, closed = (processor.tokenizer.encode(word, add_special_tokens=False)[0] for word in words)
    from revisit.decoding import floor as connection
    from revisit.models.thoughts import Thoughts

    original = connection.thoughts_of
    connection.thoughts_of = lambda *_: Thoughts(opened, closed)
    try:
        (dog,) = processor.tokenizer.encode(" dog", add_special_tokens=False)
        given, trace = inputs(scenes(1)), Trace()
        script = [opened, dog, closed, dog]
        start = given["input_ids"].shape[1]
        revisit.generate(
            model,
            **given,
            method=Greedy(floor=1),
            trace=trace,
            max_new_tokens=4,
            prefix_allowed_tokens_fn=lambda _, ids: [script[len(ids) - start]],
        )
    finally:
        connection.thoughts_of = original
    assert trace.rows[0].overruled == 1  # the second dog


def test_bad_settings():
    with pytest.raises(RevisitError, match="floor"):
        ReVisiT(floor=1.5)
    with pytest.raises(RevisitError, match="names"):
        ReVisiT(floor=0.1, names="no-such-file.txt")


def test_a_list_of_ones_own(tmp_path):
    path = tmp_path / "names.txt"
    path.write_text("zebra\nkite, glider\n")
    method = as_method(f"greedy:floor=1,names={path}")
    (answer,) = answers(method, scenes(1))
    assert set(answer.trace.rows[0].support) == {"zebra", "kite"}
    assert method.settings()["names"] == [["zebra"], ["kite", "glider"]]
    assert spelling_of(tiny()[1].tokenizer, method.names).names.of["gliders"] == "kite"
