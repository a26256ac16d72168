"""The command `torchcaps experiment`."""

from pathlib import Path
from typing import Annotated

import typer

from torchcaps.cli import Interrupted
from torchcaps.cli.common import naming_options, print_table, run_folder, writable, writable_file
from torchcaps.errors import BadInput, nearest
from torchcaps.process_memory import keep_freed_memory


@naming_options(budget="--budget", data="--data", seeds="--seeds")
def experiment(
    name: Annotated[
        str,
        typer.Argument(
            help="Name of an experiment; `list` lists all experiments, and `report` writes their results to a page."
        ),
    ],
    budget: Annotated[
        str | None,
        typer.Option(
            help="quick: takes minutes; standard: takes up to three hours per seed; paper: closest to the scale of the "
            "paper; default: quick."
        ),
    ] = None,
    data: Annotated[str | None, typer.Option(help="Dataset to use instead of the experiment's default.")] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Training runs per network, with seeds 0, 1, …; default: 1.")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder that contains the datasets; default: data.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            parser=run_folder,
            metavar="FOLDER",
            help="Folder for the runs, one subfolder per experiment and budget; default: runs/experiments.",
        ),
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(help="Folder for results and pictures; default: OUT/results if --out is given, else results."),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Page that `experiment report` writes; default: docs/experiments.md.")
    ] = None,
    page: Annotated[
        list[Path] | None,
        typer.Option(help="Existing page in which `experiment report` updates the tables; can be repeated."),
    ] = None,
) -> None:
    """Reproduce a table or figure of a paper. After an interruption, the same command continues the experiment."""
    from torchcaps.experiments import EXPERIMENTS, run_experiment
    from torchcaps.experiments.report import write_pages, write_report

    if name not in (*EXPERIMENTS, "list", "report"):
        raise BadInput(f"unknown experiment {name!r}{nearest(name, [*EXPERIMENTS, 'list', 'report'])}")
    training = {"--budget": budget, "--data": data, "--seeds": seeds, "--data-dir": data_dir}
    pages = {"--report": report, "--page": ", ".join(map(str, page)) if page else None}
    unused = {"list": {**training, "--out": out, "--results": results, **pages}, "report": training}.get(name, pages)
    for option, value in unused.items():
        if value is not None:
            raise BadInput(f"{option} is {value}, but `experiment {name}` does not use it: leave out {option}")
    results = results or (out / "results" if out else Path("results"))
    out = out or Path("runs/experiments")
    if name == "list":
        rows = [(known, "yes" if one.standard else "", one.paper, one.title) for known, one in EXPERIMENTS.items()]
        print_table(("experiment", "result in results/", "paper", "description"), rows)
        return
    if name == "report":
        report = Path("docs/experiments.md") if report is None else report
        writable_file(report, "--report", new_folder=True)
        print(f"page with {write_report(results, report, EXPERIMENTS)} results: {report}")
        if page:
            write_pages(results, page)
            print(f"tables: {', '.join(map(str, page))}")
        return
    budget, seeds, data_dir = "quick" if budget is None else budget, seeds or 1, data_dir or Path("data")
    keep_freed_memory()
    writable(out)
    writable(results, "--results")
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
