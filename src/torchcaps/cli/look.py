"""The commands `torchcaps inspect`, `torchcaps report`, `torchcaps export` and `torchcaps explore`."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from torchcaps.cli.common import DataDir, splits_for, writable_file
from torchcaps.errors import BadInput, printable
from torchcaps.process_memory import keep_freed_memory


def inspect(
    run: Annotated[Path, typer.Argument(help="Run folder, or folder of published weights.")],
    image: Annotated[Path, typer.Argument(help="Image file.")],
    out: Annotated[Path, typer.Option(help="Picture to write, a .png file.")] = Path("inspection.png"),
) -> None:
    """Draw which parts of an image support each class, in each routing iteration."""
    from torchcaps.classifier import Classifier
    from torchcaps.data.files import write_picture
    from torchcaps.inspection import about_crops
    from torchcaps.inspection import inspect as look

    writable_file(out, inputs=[image], ending=".png")
    classifier = Classifier.from_pretrained(run)
    found = look(classifier, image)
    write_picture(out, found.figure())
    best = f"{printable(found.class_names[found.best])} ({found.scores[found.best]:.3f}{about_crops(classifier)})"
    print(f"{best}\npicture: {out}")


def report(
    run: Annotated[Path, typer.Argument(help="Run folder of `torchcaps train`.")],
    out: Annotated[Path | None, typer.Option(help="HTML file to write; default: RUN/report.html.")] = None,
) -> None:
    """Write one HTML page with the metrics, pictures, recipe and environment of a run."""
    from torchcaps.run_report import write_run_report

    if out is not None and out.suffix.lower() not in (".html", ".htm"):
        raise BadInput(f"--out must be a file name that ends in .html; got {out}")
    out = run / "report.html" if out is None else out
    if run.is_dir():
        writable_file(out)
    write_run_report(run, out)
    print(f"report: {out}")


def export(
    run: Annotated[Path, typer.Argument(help="Run folder, or folder of published weights.")],
    out: Annotated[Path, typer.Option(help="File to write, a .onnx or .pt2 file.")],
    format: Annotated[
        str, typer.Option(help="onnx, pt2 (torch.export, with fused operators) or aoti (compiled by AOTInductor).")
    ] = "onnx",
    data: Annotated[
        str | None,
        typer.Option(
            help="Dataset, folder or table. Its validation images are used to compare the exported file with the "
            "classifier; default: random images."
        ),
    ] = None,
    data_dir: DataDir = Path("data"),
) -> None:
    """Write a classifier to one file for other programs. The file contains the network and the image preprocessing."""
    from torchcaps.checks import check_choice
    from torchcaps.classifier import Classifier
    from torchcaps.export import BATCH, ENDINGS, FORMATS, export_classifier
    from torchcaps.run_folder import read_run

    check_choice("--format", format, FORMATS, BadInput)
    if out.suffix.lower() != ENDINGS[format]:
        raise BadInput(f"--out must be a file name that ends in {ENDINGS[format]} for the format {format}; got {out}")
    writable_file(out)
    keep_freed_memory()
    classifier = Classifier.from_pretrained(run)
    images = None
    if data is not None:
        recipe = read_run(run).recipe if (run / "recipe.json").exists() else None
        images = splits_for(classifier, recipe, data, data_dir).validation
    found = export_classifier(classifier, out, format, images)  # type: ignore[arg-type]
    print(f"exported network, {out.stat().st_size / 2**20:.2f} MiB: {out}")
    kind = "random" if images is None else "validation"
    print(
        f"{found.runtime}, {found.images:,} {kind} images: the scores of the exported network differ from the "
        f"classifier's by at most {found.largest_difference:.2g}; both predict the same class for "
        f"{found.same_classes:,} of {found.images:,} images"
    )
    if found.images_per_second is not None:
        speed, own = found.images_per_second, found.classifier_images_per_second
        print(f"images/s in batches of {BATCH}: {speed:,.0f} in {found.runtime}, {own:,.0f} in torchcaps")


def explore(
    source: Annotated[
        Path | None, typer.Argument(help="Run folder or folder of weights; default: all networks in weights/.")
    ] = None,
    port: Annotated[int, typer.Option(min=1024, max=65535, help="Port on 127.0.0.1.")] = 7860,
    browser: Annotated[bool, typer.Option(help="Open the page in the browser.")] = True,
) -> None:
    """Open a trained network in the browser: draw or upload an image, change the routing, attack the image."""
    if find_spec("gradio") is None:
        raise BadInput("the explorer needs Gradio: pip install 'torchcaps[explore]'")
    from torchcaps.explore import Explorer, sources_of

    explorer = Explorer(sources_of(source))
    from torchcaps.explore.page import serve

    print(f"http://127.0.0.1:{port} (Ctrl-C stops the server)", flush=True)
    serve(explorer, port, open_browser=browser)
