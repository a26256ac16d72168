"""Pictures: names of classes, grey values and scales."""

import torch
from matplotlib.image import imread

from torchcaps import CapsNet, Classifier, PooledCapsNet, Preprocessing, inspect
from torchcaps.data import Images
from torchcaps.data.files import write_picture
from torchcaps.errors import caption, captions
from torchcaps.experiments import dimensions, em_mnist, two_digits
from torchcaps.pictures import save_curves


def test_long_names_in_pictures_keep_beginning_and_end_and_fit_their_width():
    one, other = (f"a very long name of a class {letter}" for letter in "AB")
    assert caption(one, 14) == "a very …lass A"
    assert caption(one, 14) != caption(other, 14)
    assert caption("价格很高的类别", 14) == "价格很高的类别"
    assert caption("价格很高的类别", 10) == "价格…类别"


def test_names_with_the_same_beginning_and_end_have_different_captions():
    names = [f"radiograph of the left {part}, lateral view" for part in ("knee", "hip", "wrist")] + [
        "价格很高的类别" * 3
    ] * 2
    found = captions([*names, "cat"], 14)
    assert found == ["radiograp… (0)", "radiograp… (1)", "radiograp… (2)", "价格很高… (3)", "价格很高… (4)", "cat"]
    assert captions(["cat", "cat"], 14) == ["cat (0)", "cat (1)"]
    assert captions(["cat", "cat", "cat (0)"], 14) == ["cat (0)", "cat (1)", "cat (0) (2)"]


def test_class_names_with_dollar_signs_are_drawn_by_the_experiments(tmp_path):
    names = tuple(f"price_$_{letter}" for letter in "abcdefghij")
    images = Images(torch.zeros(20, 1, 28, 28, dtype=torch.uint8), torch.arange(20) % 10, names)
    write_picture(tmp_path / "1.png", em_mnist.draw(images, torch.rand(20, 10)))
    write_picture(tmp_path / "2.png", dimensions.draw(torch.rand(10, 4, 3, 1, 8, 8), [*names]))
    write_picture(tmp_path / "3.png", two_digits.draw(PooledCapsNet((1, 28, 28), 10).eval(), images))


def test_the_figure_of_an_inspection_has_the_true_grey_values_and_a_scale_of_scores():
    network = CapsNet((1, 28, 28), 3, convolution_channels=8, primary_types=2).eval()
    classifier = Classifier(network, ("ant", "bee", "cat"), (1, 28, 28), Preprocessing())
    figure = inspect(classifier, torch.full((1, 28, 28), 128, dtype=torch.uint8)).figure(count=1)
    shown = {axis.get_title(): axis for axis in figure.axes}
    for name in ("image", "reconstruction"):
        assert shown[name].images[0].get_clim() == (0, 1)
    assert shown["scores"].get_xlim() == (0, 1)
    assert len(shown["scores"].get_xticks())


def test_the_curves_show_the_mean_recall_only_if_it_differs_from_the_accuracy(tmp_path):
    row = {"train_loss": 1, "validation_loss": 1, "validation_accuracy_percent": 90, "train_images_per_second": 100}
    pictures = []
    for recall in ({}, {"validation_recall_percent": 90}, {"validation_recall_percent": 40}):
        save_curves(
            [{"epoch": epoch, **row, **recall} for epoch in (1, 2)], tmp_path / "curves.png", margins=[0.2, 0.9]
        )
        pictures.append(imread(tmp_path / "curves.png"))
    assert (pictures[0] == pictures[1]).all()
    assert (pictures[0] != pictures[2]).any()
