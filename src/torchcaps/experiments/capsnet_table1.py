"""Sabour, Frosst & Hinton 2017, table 1, MNIST: routing iterations and decoder of CapsNet, and the baseline CNN."""

from dataclasses import replace

from matplotlib.figure import Figure

from torchcaps.experiments.study import Outcome, Row, Study, part

PAPER = {
    "baseline CNN": "99.61",
    "T = 1, no decoder": "99.66 ± 0.032",
    "T = 1, decoder": "99.71 ± 0.011",
    "T = 3, no decoder": "99.65 ± 0.036",
    "T = 3, decoder": "99.75 ± 0.005",
}
WIDER = {"convolution_channels": 96, "primary_types": 12}
"""Width of CapsNet for the budget ``standard``: three eighths of the paper's width."""


def run(study: Study) -> Outcome:
    """Train one network for each row of the table and each seed."""
    found: dict[str, list[float]] = {name: [] for name in PAPER}
    data = study.data or study.choose("mnist-5k", "mnist", "mnist")
    images, epochs = study.choose((3_600, 6), (54_000, 24), (54_000, 50))
    images = study.at_most(images, data)
    wider = WIDER if study.budget == "standard" else {}
    for seed in range(study.seeds):
        for name, values in found.items():
            network, options = "CNN", {}
            if name != "baseline CNN":
                network = "capsules" if name.startswith("T = 3") else "uniform couplings"
                options = {"decoder": name.endswith(", decoder"), **wider}
            recipe = study.digit_recipe(network, seed, data=data, shift=2, images=images, epochs=epochs, **options)
            if not options.get("decoder"):
                recipe = replace(recipe, reconstruction_weight=0.0)
            splits = study.splits(recipe, study.choose(images, None, None))
            values.append(study.trained(part(name, seed), recipe, splits)[1]["test_accuracy_percent"])
    rows = [Row(f"{name}: accuracy", values, PAPER[name]) for name, values in found.items()]
    notes = [f"Trained on {len(splits.train):,} {data} digits for {epochs} epochs."]
    if wider:
        notes += [
            "CapsNet has three eighths of the paper's width (96 channels, 12 primary capsule types). "
            "The CNN has an eighth of the channels of the paper's CNN."
        ]
    else:
        notes += study.notes_on_width()
    return Outcome(rows, draw(rows), [*notes, *study.notes_on_data(data)])


def draw(rows: list[Row]) -> Figure:
    """Draw the test errors, with one bar per row and one point per seed."""
    figure = Figure(figsize=(7, 3), layout="constrained")
    axis = figure.subplots()
    for place, row in enumerate(rows):
        errors = [100 - value for value in row.ours]
        axis.barh(place, sum(errors) / len(errors), color="#999999" if "CNN" in row.what else "#0072B2")
        axis.plot(errors, [place] * len(errors), "k.", markersize=4, label=None if place else "one seed")
        axis.plot(
            100 - float((row.paper or "nan").split()[0]), place, "D", color="#D55E00", label=None if place else "paper"
        )
    axis.set_yticks(range(len(rows)), [row.what.removesuffix(": accuracy") for row in rows])
    axis.invert_yaxis()
    axis.set_xlabel("test error %")
    axis.legend(fontsize=8)
    return figure
