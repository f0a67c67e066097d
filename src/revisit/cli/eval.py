"""`revisit eval`: evaluate models × methods × benchmarks."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

import typer

from revisit.cli import options
from revisit.errors import Incomplete, need
from revisit.eval.benchmarks.io.places import DEFAULT_SCENES
from revisit.eval.config import EvalConfig
from revisit.eval.report.terminal import print_section
from revisit.io.files import inside

DEFAULT = EvalConfig()


def evaluate(
    context: typer.Context,
    model: list[str] = typer.Option(
        list(DEFAULT.model), "--model", "-m", metavar="NAMES", help="Local folders or Hub ids, separated by commas."
    ),
    method: list[str] = typer.Option(
        list(DEFAULT.method),
        metavar="NAMES",
        help="Methods, separated by commas; one with settings, as in revisit:alpha=0.01, needs its own --method.",
    ),
    benchmark: list[str] = typer.Option(
        list(DEFAULT.benchmark), "--benchmark", "-b", metavar="NAMES", help="Benchmarks, separated by commas."
    ),
    data: list[str] = typer.Option(
        None,
        metavar="SOURCE",
        help="Folder with the benchmarks' files, or NAME=FOLDER for each benchmark; 'download' to download them once; or "
        f"scenes:SPLIT:NUMBER:SEED to generate scenes. Default for 'tiny': {DEFAULT_SCENES}.",
    ),
    limit: int = options.LIMIT,
    batch_size: int = options.BATCH_SIZE,
    max_new_tokens: int = options.LENGTH,
    seed: int = typer.Option(
        DEFAULT.seed,
        callback=options.validate_seed,
        help="Random seed, with --sample; each item derives its own from it.",
    ),
    seeds: str = typer.Option(
        "", help="Several seeds, for example 0,1,2, with --sample; tables show the mean ± standard deviation."
    ),
    out: Path = typer.Option(Path(DEFAULT.out), "--out", "-o", help="Folder for answers and results."),
    preset: str = typer.Option(None, help="Evaluation protocol: paper. Other options override it."),
    sample: bool = options.SAMPLE,
    temperature: float = options.TEMPERATURE,
    top_p: float = options.TOP_P,
    beams: int = options.BEAMS,
    engine: str = typer.Option(DEFAULT.engine, help="Engine: local, ray or vllm."),
    workers: int = typer.Option(None, min=1, help="Number of Ray workers; by default one per GPU or node."),
    address: str = typer.Option(None, help="Address of the Ray cluster, for example auto or ray://host:10001."),
    dtype: str = options.DTYPE,
    device_map: str = options.DEVICE_MAP,
    trust_remote_code: bool = options.TRUST_REMOTE_CODE,
    allow_incomplete: bool = options.ALLOW_INCOMPLETE,
    controls: bool = typer.Option(
        False,
        "--controls",
        help="Also run plausible_only, and greedy decoding without the image, with noise, and with another item's image.",
    ),
    only_visual: bool = typer.Option(
        False, "--only-visual", help="Skip items that greedy decoding answers correctly without the image."
    ),
    risk: float = options.RISK,
    calibration: Path = options.CALIBRATION,
    any_calibration: bool = options.ANY_CALIBRATION,
    report: bool = typer.Option(
        False, "--report", help="Also write report.html, and the samples as a page, into --out."
    ),
    quiet: bool = options.QUIET,
) -> None:
    """Evaluate decoding methods on benchmarks; rerun the command to resume.

    Items that cannot be read or answered are listed at the end, with exit status 3; the others are answered and scored.

    Examples:

      revisit eval --benchmark chair,pope --method greedy,revisit --out runs/first
      revisit eval --model llava-hf/llava-1.5-7b-hf --method greedy,revisit,vcd --benchmark pope --data ~/data
      revisit eval --method greedy --method revisit:alpha=0.001 --sample --seeds 0,1,2
    """
    from revisit.cli.progress import reporter
    from revisit.cli.results import report as write_report
    from revisit.eval.compare import compare
    from revisit.eval.log import failures, read_logs, unfinished
    from revisit.eval.report.comparisons import comparison_sections
    from revisit.eval.report.sample_browser import view
    from revisit.eval.run import run

    arguments = {name: value for name, value in context.params.items() if name not in ("quiet", "report")}
    if risk is not None and not options.named(context, "method"):
        del arguments["method"]  # it comes from the calibration
    settings = EvalConfig(**arguments | {"data": tuple(data) if data else None, "out": str(out)})
    settings.check()
    need(*settings.packages(), *(("matplotlib",) if report else ()))  # all at once, and before the work
    with reporter(quiet, out) as progress:
        done = run(settings, progress)
    logs = read_logs(out)
    if notice := unfinished(logs):  # of an earlier command with this --out
        print(notice)
    for section in comparison_sections(compare(logs)):
        print_section(section)
    if report:
        write_report(out, out)
        print(f"Wrote {view(logs, inside(out, 'view'))}; open it in a browser.")
    print(f"Logs and results: {out}; print these tables again with `revisit compare {quote(str(out))}`.")
    if failed := failures(done):
        options.print_failures(list(failed.items()))
        raise Incomplete(f"Items without an answer: {len(failed)}; rerun the command to retry.")
