"""Report of a run: one HTML page that contains its pictures."""

import base64
import html
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torchcaps.data.files import atomically
from torchcaps.errors import BadInput
from torchcaps.pictures import save_curves
from torchcaps.run_folder import finished, read_rows, read_run

PICTURES = {
    "curves.png": "Loss, validation accuracy and speed",
    "confusion.png": "Confusion matrix of the {split} images",
    "worst.png": "Images of the {split} split with the worst scores: true class above, predicted class below",
    "reconstructions.png": "Validation images and their reconstructions",
}
STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:104em;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse;margin:1em 0}td,th{border-bottom:1px solid #ddd;padding:.25em .8em;text-align:left}"
    "div,figure{overflow-x:auto}figure{margin:1.5em 0}figcaption{color:#666}"
    "pre{background:#f6f6f6;padding:1em;overflow:auto}"
)


def write_run_report(folder: Path, out: Path) -> None:
    """Write an HTML page with the metrics, pictures, recipe and environment of a run.

    If the training is not finished, or is being continued for more epochs, the page shows the metrics of the epochs so
    far and no test metrics.

    Arguments:
        folder: run folder of `torchcaps train`.
        out: HTML file to write.

    Raises:
        BadInput: the folder contains no run with a finished epoch, or a file in the folder is damaged.
    """
    run = read_run(folder)
    rows = read_rows(folder / "metrics.csv")
    if not rows:
        raise BadInput(
            f"{folder} contains no run with a finished epoch: give a run folder of `torchcaps train`, or wait for the "
            "end of the first epoch"
        )
    metrics = finished(folder, run.recipe) or {}
    if metrics and run.test_evaluations > metrics["test_evaluations"]:
        metrics = {}  # a test was interrupted, so the pictures may show other images than the metrics
    classes = metrics.pop("classes", None) or {}
    state = f"{len(rows)} of {run.recipe.epochs} epochs"
    split = metrics.get("evaluated_split", "")
    headline = (
        f"{split.capitalize()} accuracy {metrics[f'{split}_accuracy_percent']} % of {metrics[f'{split}_images']:,} "
        f"images, test evaluations by training: {metrics['test_evaluations']}"
        if metrics
        else f"Not finished: {state}; validation accuracy {rows[-1]['validation_accuracy_percent']} %"
    )
    parts = [f"<h1>{_text(folder.resolve().name)}</h1>", f"<p>{_text(headline)}.</p>"]
    with TemporaryDirectory() as drawn:
        if not metrics or not (folder / "curves.png").is_file():
            save_curves(rows, Path(drawn) / "curves.png")
        for name, text in PICTURES.items():
            caption = _text(text.format(split=split))
            path = (folder if metrics and (folder / name).is_file() else Path(drawn)) / name
            if path.is_file():
                encoded = base64.b64encode(path.read_bytes()).decode()
                parts.append(
                    f'<figure tabindex="0"><img alt="{caption}" src="data:image/png;base64,{encoded}">'
                    f"<figcaption>{caption}</figcaption></figure>"
                )
    if metrics:
        parts += ["<h2>Metrics</h2>", _table(("metric", "value"), [*metrics.items()])]
    if classes:
        cells = [(number, name, *values.values()) for number, (name, values) in enumerate(classes.items())]
        parts += ["<h2>Classes</h2>", _table(("number", "class", *next(iter(classes.values()))), cells)]
    parts += ["<h2>Epochs</h2>", _table(tuple(rows[0]), [tuple(row.values()) for row in rows])]
    for title, content in (("Recipe", run.recipe.plain()), ("Data", run.data), ("Environment", run.environment)):
        parts += [f"<h2>{title}</h2>", f"<pre>{_text(json.dumps(content, indent=2, ensure_ascii=False))}</pre>"]
    page = (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{_text(folder.resolve().name)}</title>'
        f"<style>{STYLE}</style><body><main>{''.join(parts)}</main></body></html>\n"
    )
    with atomically(out) as stream:
        stream.write(page.encode())


def _text(value: Any) -> str:
    return html.escape(("-" if value is None else str(value)).encode("utf-8", "backslashreplace").decode())


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = []
    for opening, row in [('th scope="col"', header), *(("td", row) for row in rows)]:
        lines.append(f"<tr>{''.join(f'<{opening}>{_text(cell)}</{opening[:2]}>' for cell in row)}</tr>")
    return f'<div tabindex="0"><table>{"".join(lines)}</table></div>'
