"""Hub datasets as local files: rows become the official files that a benchmark's own `load` reads.

So checksums, resuming and scoring are the same for both. Rows are streamed, code from a repository is never run, and the
folder appears only when the benchmark has read it back. Column names are those of the datasets' cards and of lmms-eval.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from revisit.benchmarks import base
from revisit.benchmarks.hallusionbench import item_key
from revisit.benchmarks.io.drafts import ARRAY, Draft, drafting, has_picture, under
from revisit.benchmarks.io.files import Record
from revisit.benchmarks.llava_bench import EMPHASIS
from revisit.benchmarks.llava_bench import FILES as LLAVA_FILES
from revisit.benchmarks.mme import COGNITION, PERCEPTION
from revisit.benchmarks.mmmu import SUBJECTS
from revisit.benchmarks.pope import KINDS
from revisit.benchmarks.vqav2 import ANNOTATIONS, QUESTIONS
from revisit.errors import RevisitError, unknown

SOURCE = "source.json"
Progress = Callable[[int], None]
Rows = Iterable[Record]
_COCO = "the COCO 2014 validation pictures (http://images.cocodataset.org/zips/val2014.zip) to DIR/val2014"

# No hub dataset holds these as published: what to download by hand.
MANUAL = {
    "chair": f"CHAIR is not fetched from the hub: unpack {_COCO} and instances_val2014.json and captions_val2014.json "
    "(http://images.cocodataset.org/annotations/annotations_trainval2014.zip) to DIR/annotations.",
    "repope": f"RePOPE is not fetched from the hub: unpack {_COCO} and put coco_repope_random.json, "
    "coco_repope_popular.json and coco_repope_adversarial.json from the annotations folder of "
    "https://github.com/YanNeu/RePOPE into DIR/repope.",
    "amber": "AMBER is not fetched from the hub: put the data folder of https://github.com/junyangwang0410/AMBER at "
    "DIR/amber/data and the pictures that its README links to at DIR/amber/image.",
}

# ---------------------------------------------------------------------------------------- rows to official files


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _one_of(row: Record, column: str, allowed: Iterable[str], *, lower: bool = True) -> str:
    """The column's value, which must be one of `allowed`."""
    allowed = tuple(allowed)
    text = str(row[column]).strip()
    text = text.lower() if lower else text
    if text not in allowed:
        raise RevisitError(f"{row.where}: {column!r} must be one of {', '.join(allowed)}, not {row[column]!r}.")
    return text


def _once(seen: set[Any], key: Any, row: Record) -> None:
    if key in seen:
        raise RevisitError(f"{row.where}: {key!r} is there a second time; this is not the dataset as published.")
    seen.add(key)


def _whole(row: Record, column: str) -> int:
    try:
        return int(row[column])
    except (TypeError, ValueError) as error:
        raise RevisitError(f"{row.where}: {column!r} must be a whole number, not {row[column]!r}.") from error


def _pope(rows: Rows, out: Draft) -> None:
    """One question file per category, which is a setting; `image_source` is the COCO file name without its ending."""
    seen: set[Any] = set()
    for row in rows:
        kind, number = _one_of(row, "category", KINDS), _whole(row, "question_id")
        _once(seen, (kind, number), row)
        name = str(row["image_source"]).removesuffix(".jpg")
        image = out.picture(f"val2014/{name}", row["image"], row.where)
        label = _one_of(row, "answer", ("yes", "no"))
        entry = {"question_id": number, "image": Path(image).name, "text": row["question"], "label": label}
        out.add(f"pope/coco_pope_{kind}.json", _line(entry))


_HALLUSION = (
    "category",
    "subcategory",
    "visual_input",
    "set_id",
    "figure_id",
    "question_id",
    "question",
    "gt_answer_details",
    "gt_answer",
    "filename",
)


def _hallusionbench(rows: Rows, out: Draft) -> None:
    """One list of questions; a question without a figure has no file name, as in the official file."""
    seen: set[Any] = set()
    for row in rows:
        fields = {name: row[name] for name in (*_HALLUSION, "sample_note") if name in row}
        entry = {name: value if value is None else str(value) for name, value in fields.items()}
        _once(seen, item_key(entry), row)
        _one_of(row, "gt_answer", ("0", "1"))
        entry["filename"] = None
        if str(row["visual_input"]) != "0":
            if not row["filename"]:
                raise RevisitError(f"{row.where} has a figure without a file name.")
            entry["filename"] = str(row["filename"]).removeprefix("./")
            out.picture(f"hallusionbench/{entry['filename']}", row.get("image"), row.where, named=True)
        out.add("hallusionbench/HallusionBench.json", _line(entry), ARRAY)


def _vqav2(rows: Rows, out: Draft) -> None:
    """The official pair of files; a question's picture is named by its COCO id."""
    seen: set[Any] = set()
    for row in rows:
        number, image = _whole(row, "question_id"), _whole(row, "image_id")
        _once(seen, number, row)
        answers = row["answers"]
        if isinstance(answers, Mapping):  # columns instead of rows: an older way to store a list of objects
            answers = [dict(zip(answers, values, strict=True)) for values in zip(*answers.values(), strict=True)]
        if not answers:
            raise RevisitError(f"{row.where} has no human answers, so it cannot be scored; use --split validation.")
        out.picture(f"val2014/COCO_val2014_{image:012d}", row["image"], row.where, only=(".jpg", ".png"))
        question = {"question_id": number, "image_id": image, "question": row["question"]}
        known = {k: row[k] for k in ("question_type", "answer_type", "multiple_choice_answer") if row.get(k)}
        annotation = {"question_id": number, "image_id": image, "answers": answers} | known
        out.add(f"vqav2/{QUESTIONS}", _line(question), under("questions"))
        out.add(f"vqav2/{ANNOTATIONS}", _line(annotation), under("annotations"))


_MARK = re.compile(r"<image (\d)>")


def _mmmu(rows: Rows, out: Draft) -> None:
    """One line per question; its pictures are those of image_1 to image_7 that are there."""
    seen: set[Any] = set()
    for row in rows:
        _once(seen, row["id"], row)
        if row["answer"] in (None, "", "?"):
            raise RevisitError(f"{row.where} has no answer, so it cannot be scored; use --split validation.")
        held = [n for n in range(1, 8) if has_picture(row.get(f"image_{n}"))]
        for mark in _MARK.findall(f"{row['question']} {row['options']}"):
            if int(mark) not in held:
                raise RevisitError(f"{row.where} speaks of <image {mark}>, but has no picture image_{mark}.")
        images = [out.picture(f"mmmu/images/{row['id']}_{n}", row[f"image_{n}"], row.where) for n in held]
        entry = {k: row[k] for k in ("id", "question", "options", "answer", "question_type")}
        out.add("mmmu/questions.jsonl", _line(entry | {"images": images}))


def _mme(rows: Rows, out: Draft) -> None:
    """A text file with both questions beside each picture; a picture whose second question is cut off is left out."""
    waiting: dict[str, str] = {}  # place -> its first question
    for row in rows:
        category = _one_of(row, "category", PERCEPTION + COGNITION, lower=False)
        question, gold = str(row["question"]).strip(), _one_of(row, "answer", ("yes", "no"))
        place = f"mme/{category}/{Path(str(row['question_id'])).stem}"
        if "\n" in question:
            raise RevisitError(f"{row.where}: the question has several lines, which MME's files cannot hold.")
        if place in out.pictures:
            raise RevisitError(f"{row.where} is a third question about {row['question_id']}; MME has two per picture.")
        line = f"{question}\t{gold.capitalize()}\n"
        if place in waiting:
            out.picture(place, row["image"], row.where)
            out.text(f"{place}.txt", waiting.pop(place) + line)
        else:
            waiting[place] = line
    if waiting and not out.pictures:
        raise RevisitError("MME asks two questions per picture, and these rows hold no such pair; raise --limit.")


def _llava_bench(rows: Rows, out: Draft) -> None:
    """The official three files; a picture's description is written once."""
    questions, context, reference = (f"llava_bench/{name}" for name in LLAVA_FILES)
    seen: set[Any] = set()
    for row in rows:
        number = _whole(row, "question_id")
        _once(seen, number, row)
        stem = Path(str(row["image_id"])).stem
        fresh = f"llava_bench/images/{stem}" not in out.pictures
        image = Path(out.picture(f"llava_bench/images/{stem}", row["image"], row.where)).name
        if fresh:
            caption = row["caption"] if isinstance(row["caption"], str) else "\n".join(row["caption"])
            out.add(context, _line({"id": stem, "image": image, "caption": caption}))
        category = _one_of(row, "category", EMPHASIS)
        out.add(
            questions, _line({"image": image, "text": row["question"], "category": category, "question_id": number})
        )
        out.add(reference, _line({"question_id": number, "prompt": row["question"], "text": row["gpt_answer"]}))


@dataclass(frozen=True)
class Dataset:
    """Where a benchmark's rows are: the first of `repos` that exists; `columns` must be there, whatever else is."""

    repos: tuple[str, ...]
    splits: tuple[str, ...]
    columns: tuple[str, ...]
    write: Callable[[Rows, Draft], None]
    by_subject: bool = False  # one configuration per subject
    large: bool = False  # too large to be fetched whole for a few items


def _lmms(name: str) -> tuple[str, ...]:
    """lmms-eval's datasets moved from the first to the second owner in July 2026."""
    return (f"lmms-lab/{name}", f"lmms-lab-encoder/{name}")


DATASETS = {
    "pope": Dataset(
        _lmms("POPE"), ("test",), ("question_id", "question", "answer", "image_source", "image", "category"), _pope
    ),
    "hallusionbench": Dataset(_lmms("HallusionBench"), ("image", "non_image"), _HALLUSION, _hallusionbench),
    "vqav2": Dataset(
        _lmms("VQAv2"), ("validation",), ("question_id", "image_id", "question", "answers", "image"), _vqav2, large=True
    ),
    "mmmu": Dataset(
        ("MMMU/MMMU",),
        ("validation",),
        ("id", "question", "options", "answer", "question_type", "image_1"),
        _mmmu,
        by_subject=True,
    ),
    "mme": Dataset(_lmms("MME"), ("test",), ("question_id", "image", "question", "answer", "category"), _mme),
    "llava_bench": Dataset(
        _lmms("llava-bench-in-the-wild"),
        ("train",),
        ("question_id", "question", "image", "caption", "gpt_answer", "category", "image_id"),
        _llava_bench,
    ),
}

# --------------------------------------------------------------------------------------------------- the source


@dataclass(frozen=True)
class Place:
    """A hub repository at one revision, or a folder with a dataset's files (`revision` None)."""

    source: str
    revision: str | None = None

    @property
    def options(self) -> dict[str, str]:
        return {"revision": self.revision} if self.revision else {}


def _library() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise RevisitError(
            "Fetching from the hub needs the `datasets` package: pip install 'revisit-decoding[hub]'."
        ) from error
    if int(datasets.__version__.split(".")[0]) < 4:  # older ones can run code from a repository
        raise RevisitError(f"datasets {datasets.__version__} is too old: pip install 'datasets>=4'.")
    return datasets


def _reason(error: BaseException) -> str:
    """The first line of what went wrong, without its full stop."""
    text = str(error).strip().split("\n")[0].rstrip(".")
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


def locate(repos: Iterable[str], given: str | None) -> Place:
    """The place `given`, or the first of `repos` that the hub has."""
    if given is not None:
        if Path(given).expanduser().is_dir():
            return Place(str(Path(given).expanduser().resolve()))
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", given):
            raise RevisitError(f"{given!r} is neither a folder nor a hub dataset OWNER/NAME.")
        repos = (given,)
    repos = tuple(repos)
    for repo in repos:
        revision = _revision(repo)
        if revision:
            return Place(repo, revision)
    raise RevisitError(
        f"The hub has no dataset {' or '.join(repos)}, or not for you; name another with --from OWNER/NAME, or a folder "
        "with its files (if it is private, log in with `hf auth login` first)."
    )


def _revision(repo: str) -> str | None:
    """The commit that the repository is at; None if there is no such repository."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        return HfApi().dataset_info(repo, timeout=30).sha
    except RepositoryNotFoundError:
        return None
    except Exception as error:  # every transport has its own kinds
        raise RevisitError(
            f"The hub dataset {repo} cannot be reached ({_reason(error)}); check the connection, or run `hf download {repo} "
            "--repo-type dataset --local-dir FOLDER` where there is one and give --from FOLDER."
        ) from error


def _configs(library: Any, dataset: Dataset, place: Place) -> list[str | None]:
    """The configurations to read: the subjects that are there in official order, or the only one."""
    if not dataset.by_subject:
        return [None]
    try:
        known = set(library.get_dataset_config_names(place.source, **place.options))
    except Exception as error:
        raise _unreadable(place, error) from error
    return [subject for subject in SUBJECTS if subject in known] or [None]


def _unreadable(place: Place, error: BaseException) -> RevisitError:
    return RevisitError(
        f"{place.source} cannot be read as a dataset ({_reason(error)}); nothing was written. "
        "If the connection broke, run the same command again; else name the right place with --from."
    )


def _rows(library: Any, dataset: Dataset, place: Place, splits: Iterable[str]) -> Iterator[Record]:
    """All rows as streamed, pictures undecoded; each split is opened when it is reached."""
    for config in _configs(library, dataset, place):
        try:
            found = library.load_dataset(place.source, config, streaming=True, **place.options)
        except Exception as error:
            raise _unreadable(place, error) from error
        known = {str(name): stream for name, stream in found.items()}
        for split in splits:
            if split not in known:
                raise unknown(f"split of {place.source}:", split, known)
            where = f"{place.source} {f'{config} ' if config else ''}{split}"
            yield from _checked(_undecoded(known[split], place), where, dataset)


def _undecoded(stream: Any, place: Place) -> Iterator[Mapping[str, Any]]:
    """The rows with their pictures as stored; whatever breaks on the way is one sentence."""
    try:
        yield from stream.decode(False) if stream.features else stream
    except Exception as error:
        raise _unreadable(place, error) from error


def _checked(stream: Iterable[Mapping[str, Any]], where: str, dataset: Dataset) -> Iterator[Record]:
    for number, row in enumerate(stream, 1):
        missing = [name for name in dataset.columns if name not in row]
        if missing:
            raise RevisitError(
                f"{where} has no column {', '.join(missing)} (it has {', '.join(row)}), so it is not laid out like "
                f"{dataset.repos[0]}; give another --from, or use the official files (docs/benchmarks.md)."
            )
        yield Record(row, f"{where} row {number}")


# ------------------------------------------------------------------------------------------------------ fetching


def find(benchmark: str) -> tuple[str, Dataset]:
    """The benchmark's registry name and its dataset, or the sentence that says what to do by hand."""
    key = benchmark.lower().replace("-", "_")
    if key in MANUAL:
        raise RevisitError(MANUAL[key])
    if key not in DATASETS:
        raise unknown("benchmark", benchmark, base.names())
    return key, DATASETS[key]


def get(
    benchmark: str,
    folder: Path,
    source: str | None = None,
    split: str | None = None,
    limit: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Makes `folder` the benchmark's data folder and gives what its source.json says.

    A folder that the same request made is left as it is; one that holds anything else is refused.
    """
    key, dataset = find(benchmark)
    if limit is not None and limit < 1:
        raise RevisitError(f"limit must be at least 1, not {limit}; leave it out to fetch everything.")
    folder = folder.expanduser().resolve()
    asked = {"from": spelled(source), "split": split, "limit": limit}
    if known := _present(folder, {"benchmark": key, "asked": asked}):
        return known
    library = _library()
    splits = tuple(split.split(",")) if split else dataset.splits
    place = locate(dataset.repos, source)
    with drafting(folder) as out:
        rows = _Counted(islice(_rows(library, dataset, place, splits), limit), progress)
        dataset.write(rows, out)
        out.close()
        about = {
            "benchmark": key,
            "source": place.source,
            "revision": place.revision,
            "splits": list(splits),
            "rows": rows.count,
            "items": _read_back(key, out.root, rows.count, place, whole=limit is None),
            "pictures": len(out.pictures),
            "fingerprint": out.fingerprint(),
            "datasets": library.__version__,
            "asked": asked,
        }
        out.text(SOURCE, json.dumps(about, indent=1, ensure_ascii=False) + "\n")
    return about


class _Counted:
    """The rows, counted as they pass."""

    def __init__(self, rows: Iterable[Record], progress: Progress | None) -> None:
        self.rows, self.progress, self.count = rows, progress, 0

    def __iter__(self) -> Iterator[Record]:
        for row in self.rows:
            yield row
            self.count += 1
            if self.progress is not None:
                self.progress(self.count)


def spelled(source: str | None) -> str | None:
    """A folder by its full path, a repository as it is."""
    if source is not None and Path(source).expanduser().is_dir():
        return str(Path(source).expanduser().resolve())
    return source


def _present(folder: Path, wanted: Mapping[str, Any]) -> dict[str, Any] | None:
    """What source.json says if `folder` is the answer to the same request; None if it is free."""
    if not folder.exists():
        return None
    if not folder.is_dir():
        raise RevisitError(f"{folder} is a file; name a new or empty folder.")
    if not any(folder.iterdir()):
        return None
    try:
        known = json.loads((folder / SOURCE).read_text("utf-8"))
    except (OSError, ValueError):
        known = {}
    if not _ours(known) or any(known.get(name) != value for name, value in wanted.items()):
        whose = f"{known['benchmark']} from {known['source']}" if _ours(known) else "other files"
        raise RevisitError(f"{folder} is not empty and holds {whose}; name a new folder, or remove that one first.")
    return dict(known)


def _ours(known: Any) -> bool:
    return isinstance(known, dict) and {"benchmark", "source", "asked"} <= set(known)


def _read_back(key: str, root: Path, rows: int, place: Place, *, whole: bool) -> int:
    """How many items the benchmark finds in `root`, every picture there; one per row if the set is `whole`."""
    if rows == 0:
        raise RevisitError(f"{place.source} has no rows in that split; nothing was written.")
    items = base.get(key).load(root)
    if whole and len(items) != rows:
        raise RevisitError(f"{place.source}: {rows} rows make {len(items)} questions; nothing was written.")
    for item in items:
        for image in item.images:
            if not image.is_file():
                raise RevisitError(f"{place.source}: the picture of {item.id} is missing; nothing was written.")
    return len(items)
