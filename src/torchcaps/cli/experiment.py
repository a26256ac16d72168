"""The command `torchcaps experiment`."""

from pathlib import Path
from typing import Annotated

import typer

from torchcaps.cli import Interrupted
from torchcaps.cli.common import DataDir, print_table, writable
from torchcaps.errors import BadInput, nearest
from torchcaps.process_memory import keep_freed_memory


def experiment(
    name: Annotated[
        str,
        typer.Argument(
            help="Name of an experiment; `list` lists all experiments, and `report` writes their results to a page."
        ),
    ],
    budget: Annotated[
        str, typer.Option(help="quick: takes minutes; standard: takes about an hour; paper: the scale of the paper.")
    ] = "quick",
    data: Annotated[str | None, typer.Option(help="Dataset to use instead of the experiment's default.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Training runs per network, with seeds 0, 1, …")] = 1,
    data_dir: DataDir = Path("data"),
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the runs, one subfolder per experiment and budget; default: runs/experiments."),
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(help="Folder for results and pictures; default: OUT/results if --out is given, else results."),
    ] = None,
    report: Annotated[Path, typer.Option(help="Page that `experiment report` writes.")] = Path("docs/experiments.md"),
    page: Annotated[
        list[Path] | None,
        typer.Option(help="Existing page in which `experiment report` updates the tables; can be repeated."),
    ] = None,
) -> None:
    """Reproduce a table or figure of a paper. After an interruption, the same command continues the experiment."""
    from torchcaps.experiments import EXPERIMENTS, run_experiment
    from torchcaps.experiments.report import write_pages, write_report

    results = results or (out / "results" if out else Path("results"))
    out = out or Path("runs/experiments")
    if name == "list":
        rows = [(known, "yes" if one.standard else "", one.paper, one.title) for known, one in EXPERIMENTS.items()]
        print_table(("experiment", "standard", "paper", "description"), rows)
        return
    if name == "report":
        titles = {known: (one.title, one.paper) for known, one in EXPERIMENTS.items()}
        print(f"{write_report(results, report, titles)} experiments in {report}")
        if page:
            write_pages(results, page)
            print(f"tables written to {', '.join(map(str, page))}")
        return
    if name not in EXPERIMENTS:
        raise BadInput(f"unknown experiment {name!r}{nearest(name, [*EXPERIMENTS, 'list', 'report'])}")
    keep_freed_memory()
    writable(out)
    writable(results)
    try:
        outcome, picture = run_experiment(
            name, budget=budget, data=data, seeds=seeds, data_dir=data_dir, out=out, results=results
        )
    except KeyboardInterrupt:
        raise Interrupted("run the same command to continue") from None
    lines = [(row.what, row.paper or "", row.measured()) for row in outcome.rows]
    print_table(("result", "paper", "ours"), lines, f"{EXPERIMENTS[name].title}; {budget}")
    for note in outcome.notes:
        print(note)
    print(f"picture: {picture}")
