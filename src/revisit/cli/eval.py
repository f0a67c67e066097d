"""`revisit eval`: models × methods × benchmarks, resumable, with intervals."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

import typer

from revisit.cli import options
from revisit.errors import need
from revisit.eval.benchmarks.io.places import DEFAULT_SCENES
from revisit.eval.config import EvalConfig

DEFAULT = EvalConfig()  # used for every flag that is not given
MODELS = list(DEFAULT.model)
METHODS = [",".join(map(str, DEFAULT.method))]
BENCHMARKS = [",".join(map(str, DEFAULT.benchmark))]


def evaluate(
    context: typer.Context,
    model: list[str] = typer.Option(
        MODELS, "--model", "-m", metavar="NAMES", help="Local folders or Hub ids, separated by commas."
    ),
    method: list[str] = typer.Option(
        METHODS, metavar="NAMES", help="Methods, separated by commas; settings as revisit:alpha=0.01."
    ),
    benchmark: list[str] = typer.Option(
        BENCHMARKS, "--benchmark", "-b", metavar="NAMES", help="Benchmarks, separated by commas."
    ),
    data: list[str] = typer.Option(
        None,
        metavar="PLACE",
        help="Folder with the benchmarks' files, or NAME=FOLDER for each; scenes:SPLIT:NUMBER:SEED generates them, download "
        f"downloads them once, like `revisit data get`. Default for tiny: {DEFAULT_SCENES}.",
    ),
    limit: int = options.LIMIT,
    batch_size: int = options.BATCH_SIZE,
    max_new_tokens: int = typer.Option(
        DEFAULT.max_new_tokens, min=1, help="Maximum length of an answer; by default the benchmark's own."
    ),
    seed: int = typer.Option(
        DEFAULT.seed,
        callback=options.a_seed,
        help="Seed of --sample; every item gets its own seed derived from it.",
    ),
    seeds: str = typer.Option(
        "",
        help="With --sample: several seeds, such as 0,1,2; tables show the mean ± standard deviation.",
    ),
    out: Path = typer.Option(Path(DEFAULT.out), "--out", "-o", help="Folder for answers and results."),
    preset: str = typer.Option(None, help="Protocol: paper. Other options override it."),
    sample: bool = options.SAMPLE,
    temperature: float = options.TEMPERATURE,
    top_p: float = options.TOP_P,
    beams: int = options.BEAMS,
    engine: str = typer.Option(DEFAULT.engine, help="Engine: local, ray or vllm."),
    workers: int = typer.Option(
        DEFAULT.workers, min=1, help="With --engine ray: number of workers; by default one per GPU or node."
    ),
    address: str = typer.Option(
        DEFAULT.address, help="With --engine ray: address of the cluster, such as auto or ray://host:10001."
    ),
    dtype: str = options.DTYPE,
    device_map: str = options.DEVICE_MAP,
    trust_remote_code: bool = options.TRUST_REMOTE_CODE,
    allow_incomplete: bool = options.ALLOW_INCOMPLETE,
    controls: bool = typer.Option(
        False,
        "--controls",
        help="Add plausible-only, and greedy decoding without the image, with noise, and with another item's image.",
    ),
    only_visual: bool = typer.Option(
        False, "--only-visual", help="Leave out items that greedy decoding answers correctly without the image."
    ),
    quiet: bool = options.QUIET,
) -> None:
    """Evaluate methods on benchmarks; a stopped run resumes with the same command.

    Examples:

      revisit eval --benchmark chair,pope --method greedy,revisit --out runs/first

      revisit eval --model llava-hf/llava-1.5-7b-hf --method greedy,revisit,vcd --benchmark pope --data ~/data

      revisit eval --method greedy --method revisit:alpha=0.001 --sample --seeds 0,1,2
    """
    from revisit.cli.progress import reporter
    from revisit.eval.compare import about_added, compare
    from revisit.eval.log import LOGS, read_logs, unfinished
    from revisit.eval.report.comparisons import comparison_sections
    from revisit.eval.report.terminal import print_section
    from revisit.eval.run import run

    given = {name: value for name, value in context.params.items() if name not in ("out", "quiet")}
    settings = EvalConfig(**given | {"data": tuple(data) if data else None, "out": str(out)})
    settings.check()
    need(*settings.packages())  # all at once, and before the work
    before = read_logs(out) if any((out / LOGS).glob("*.jsonl")) else []
    with reporter(quiet, out) as progress:
        run(settings, progress)
    logs = read_logs(out)
    if notice := unfinished(logs):  # of an earlier command with this --out
        print(notice)
    tables = compare(logs)
    for section in comparison_sections(tables):
        print_section(section)
    for note in about_added(before, tables):
        print(note)
    print(f"Logs and results: {out}; more with `revisit compare {quote(str(out))}`.")
