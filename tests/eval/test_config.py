"""The options of an evaluation: their meaning together, and wrong ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import families
from revisit import VCD, Chain, ReVisiT
from revisit.decoding.method_id import MethodId
from revisit.decoding.settings import Decoding
from revisit.errors import RevisitError
from revisit.eval import benchmarks
from revisit.eval.benchmarks import language
from revisit.eval.benchmarks.io.places import parse_data, parse_scenes
from revisit.eval.config import EvalConfig
from revisit.eval.run import run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights: a configuration needs none."""
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text('{"model_type": "llava"}')
    return path


def checked(tmp_path: Path, **values: Any) -> EvalConfig:
    config = EvalConfig(**{"data": str(tmp_path), **values})
    config.check()
    return config


def test_names_are_split_and_settings_reach_their_method(tmp_path: Path, model: Path) -> None:
    made = checked(
        tmp_path,
        model=str(model),
        method=["greedy,revisit", "revisit:alpha=0.01,layers=all"],
        benchmark=["pope:parser=vcd", "chair"],
    )
    labels = [MethodId.of(m) for m in made.methods_for(str(model))]
    assert labels == ["greedy", "revisit", "revisit(alpha=0.01, layers=all)"]
    assert [b.name for b in made.benchmarks] == ["pope", "chair"]
    assert made.benchmarks[0].parser == "vcd"
    for data in (tmp_path, [tmp_path], {"pope": tmp_path, "chair": str(tmp_path)}):
        assert made.replace(data=data).folders == {"pope": tmp_path, "chair": tmp_path}


def test_a_chain_under_the_papers_preset_takes_published_settings(tmp_path: Path, model: Path) -> None:
    for named in ("chain", "chain:methods=[vcd,revisit]"):
        made = checked(tmp_path, model=str(model), method=[named], benchmark="pope", preset="paper")
        assert made.methods_for(str(model)) == (Chain([VCD.official(), ReVisiT()]),)
    made = checked(tmp_path, model=str(model), method=["chain:methods=[greedy;vcd:alpha=2]"], preset="paper")
    assert made.methods_for(str(model)) == (Chain(["greedy", VCD.official(alpha=2.0)]),)


def test_settings_default_to_those_recommended_for_the_model(tmp_path: Path) -> None:
    for name, config, generation in (
        ("llava", '{"model_type": "llava"}', "{}"),
        ("qwen", '{"model_type": "qwen2_5_vl"}', "{}"),
        ("own", '{"model_type": "llava"}', '{"revisit": {"alpha": 0.02}}'),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(config)
        (tmp_path / name / "generation_config.json").write_text(generation)
    names = [str(tmp_path / name) for name in ("llava", "qwen", "own")]
    made = checked(tmp_path, model=names, method=["greedy", "revisit", "revisit:alpha=0.3"])
    assert [[MethodId.of(m) for m in made.methods_for(name)] for name in names] == [
        ["greedy", "revisit", "revisit(alpha=0.3)"],
        ["greedy", "revisit(layers=all)", "revisit(alpha=0.3, layers=all)"],
        ["greedy", "revisit(alpha=0.02)", "revisit(alpha=0.3)"],
    ]


@pytest.mark.parametrize(
    "values",
    [
        {"metod": "greedy"},
        {"sample": "maybe"},
        {"max_new_tokens": 0},
        {"seeds": [0.5]},
        {"seeds": "0,x"},
        {"seeds": "-1"},
        {"seed": -1},
        {"limit": "five"},
        {"batch_size": 2.5},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"beams": 100000},
        {"data": 3},
        {"out": ["a"]},
        {"engine": 3},
        {"preset": 3},
        {"dtype": 3},
    ],
    ids=str,
)
def test_a_wrong_value_raises_one_sentence_that_names_its_option(values: dict[str, Any]) -> None:
    with pytest.raises(RevisitError, match=next(iter(values))) as raised:
        EvalConfig(**values)
    assert len(str(raised.value).splitlines()) == 1


def test_text_is_read_by_the_type_of_its_option() -> None:
    made = EvalConfig(sample="no", beams="3", seeds="1, 2", data="a,b", temperature="1e-3")
    assert (made.sample, made.beams, made.seeds, made.data, made.temperature) == (False, 3, (1, 2), "a,b", 0.001)
    assert made.all_seeds == (1, 2)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"method": "revist"}, "Unknown method 'revist'. Did you mean 'revisit'"),
        ({"benchmark": "pop"}, "Unknown benchmark 'pop'. Did you mean 'pope'"),
        ({"engine": "locl"}, "engine must be"),
        ({"temperature": 0.5}, "need --sample"),
        ({"sample": True, "temperature": 0.0}, "temperature must be"),
        ({"sample": True, "beams": 2}, "either a temperature or num_beams"),
        ({"seed": 5}, "--seed and --seeds need --sample"),
        ({"seeds": "0,1"}, "--seed and --seeds need --sample"),
        ({"sample": True, "seed": 5, "seeds": "0,1"}, "use one of them"),
        ({"sample": True, "seeds": "1,1"}, "seed '1' is listed twice"),
        ({"method": "greedy,greedy"}, "method 'greedy' is listed twice"),
        ({"benchmark": ["pope:suffix=one-word", "pope:suffix=one-word"]}, "is listed twice"),
        ({"model": ()}, "at least one model"),
        ({"data": "nowhere/at/all"}, "'nowhere/at/all' does not exist"),
        ({"data": None, "model": "org/model"}, "--data is missing"),
        ({"method": "revisit:alpha"}, "alpha"),
        ({"method": [{"alpha": 1}]}, "needs its name"),
        ({"method": 3}, "3 is not a name"),
        ({"method": ReVisiT}, r"ReVisiT is a class: give an object, such as ReVisiT\(\)"),
    ],
)
def test_wrong_names_and_combinations_raise(tmp_path: Path, values: dict[str, Any], words: str) -> None:
    with pytest.raises(RevisitError, match=words):
        checked(tmp_path, **values)


def test_sampling_is_part_of_the_decoding(tmp_path: Path) -> None:
    made = checked(tmp_path, sample=True, temperature=0.7, top_p=0.9, max_new_tokens=33)
    assert made.decoding_for(made.benchmarks[0]) == Decoding(max_new_tokens=33, temperature=0.7, top_p=0.9)
    greedy = checked(tmp_path)
    assert greedy.decoding_for(greedy.benchmarks[0]) == Decoding(max_new_tokens=greedy.benchmarks[0].max_new_tokens)


def test_data_for_each_benchmark() -> None:
    names = ["pope", "chair"]
    assert parse_data(["pope=a", "b"], names) == {"pope": "a", "chair": "b"}
    assert parse_data({"pope": "a", "chair": "c"}, names) == {"pope": "a", "chair": "c"}
    assert parse_data("odd=name", names) == {"pope": "odd=name", "chair": "odd=name"}
    with pytest.raises(RevisitError, match="no folder for benchmark 'chair'"):
        parse_data(["pope=a"], names)
    with pytest.raises(RevisitError, match="two folders"):
        parse_data(["a", "b"], names)
    with pytest.raises(RevisitError, match="Unknown benchmark in --data: 'mmmu'"):
        parse_data(["mmmu=a", "b"], names)


def test_folders_may_be_called_like_scenes_and_downloads() -> None:
    for name in ("scenes_of_mine", "downloads/coco"):
        with pytest.raises(RevisitError, match="does not exist"):
            EvalConfig(benchmark="pope", data=name).check()
    assert EvalConfig(benchmark="chair", data="scenes_of_mine").needs_nltk_data


def test_scenes_by_name() -> None:
    assert parse_scenes("scenes") == ("unusual", 100, 0)
    assert parse_scenes("scenes:usual:20:3") == ("usual", 20, 3)
    for wrong in ("x", "0", "99999999999", "2:-1", "1:2:3"):
        with pytest.raises(RevisitError, match="scenes:SPLIT:NUMBER:SEED"):
            parse_scenes(f"scenes:usual:{wrong}")
    with pytest.raises(RevisitError, match="Did you mean 'unusual'"):
        parse_scenes("scenes:unusal")


def test_the_url_of_a_judge_is_not_part_of_the_identity() -> None:
    here, there = (
        benchmarks.get("hallusionbench", judge="model", judge_url=f"http://{host}/v1") for host in ("here", "there")
    )
    assert here.options() == there.options()
    assert here.options()["judge_model"] == "gpt-4"


def test_nltk_data_is_required_before_the_first_answer(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embedded model's captions of generated scenes are scored without it."""
    monkeypatch.setattr(language, "missing_packages", lambda: ["wordnet"])
    assert not EvalConfig(benchmark="chair").needs_nltk_data
    assert EvalConfig(benchmark="chair", data=str(tmp_path)).needs_nltk_data
    config = EvalConfig(model=str(model), benchmark="chair", data="scenes:unusual:2", out=str(tmp_path / "out"))
    with pytest.raises(RevisitError, match="NLTK data not found: wordnet"):
        run(config, engine_for=lambda _: pytest.fail("an engine was opened"))


def test_an_object_with_a_long_repr_raises_one_line(tmp_path: Path) -> None:
    class Module:
        def __repr__(self) -> str:
            return "Module(\n  (layer): Linear()\n)"

    with pytest.raises(RevisitError, match=r"^Module\( \(layer\): Linear\(\) \) is not a name: .*\.$"):
        checked(tmp_path, model=[(Module(), None)])


def test_a_chain_of_names_takes_the_settings_recommended_for_the_model(tmp_path: Path) -> None:
    chain = Chain(methods=("revisit",))
    (by_object,) = checked(tmp_path, method=chain).methods_for("tiny")
    (by_name,) = checked(tmp_path, method="chain:methods=revisit").methods_for("tiny")
    assert by_object.settings() == by_name.settings() != chain.settings()


def test_methods_may_come_from_a_generator(tmp_path: Path) -> None:
    made = checked(tmp_path, method=(name for name in ("greedy", "vcd")))
    assert [method.name for method in made.methods_for("tiny")] == ["greedy", "vcd"]


@pytest.mark.parametrize("option", [{"dtype": "bfloat16"}, {"device_map": "cpu"}, {"allow_incomplete": True}])
def test_options_of_loading_raise_for_a_loaded_model(tmp_path: Path, option: dict[str, Any]) -> None:
    with pytest.raises(RevisitError, match="no effect on a loaded model"):
        checked(tmp_path, model=families.build("llava"), **option)
