"""Training with another number of routing iterations in the first epochs."""

import pytest

from test_training import even_digits, train_whole_and_stopped, weights_equal
from torchcaps import BadInput
from torchcaps.recipes import create_recipe
from torchcaps.training import fit, new_module
from torchcaps.training_module import TrainingModule

pytestmark = pytest.mark.usefixtures("blank_pictures")
CAPSNET = {"model.convolution_channels": "8", "model.primary_types": "2", "model.primary_pose_size": "4"}
SETTINGS = {"epochs": "4", "batch_size": "20", "precision": "float32", "early_epochs": "2", "early_iterations": "1"}


def recipe_of(name="capsnet-mnist", **changes):
    return create_recipe(name, {**CAPSNET, **SETTINGS, **changes})


class Watched(TrainingModule):
    """Records the number of iterations of the class capsules in every step."""

    seen: list[tuple[str, int, int]]

    def record(self, phase):
        self.seen.append((phase, self.current_epoch, self.model.class_capsules.routing.iterations))

    def training_step(self, batch, batch_index):
        self.record("training")
        return super().training_step(batch, batch_index)

    def validation_step(self, batch, batch_index):
        self.record("validation")
        super().validation_step(batch, batch_index)

    def test_step(self, batch, batch_index):
        self.record("test")
        super().test_step(batch, batch_index)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rule", ["dynamic", "em"])
def test_the_first_epochs_of_training_have_other_iterations_and_validation_and_test_have_not(rule, tmp_path):
    Watched.seen = []
    recipe = recipe_of(**{"model.routing": rule, "routing.iterations": "3"})
    fit(recipe, even_digits(), tmp_path / "run", module_class=Watched)
    assert {x for x in Watched.seen if x[0] == "training"} == {("training", e, 1 if e < 2 else 3) for e in range(4)}
    assert {x[2] for x in Watched.seen if x[0] != "training"} == {3}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("epochs_before", [2, 3])
def test_a_resumed_run_gives_bit_identical_weights(epochs_before, tmp_path):
    train_whole_and_stopped(recipe_of(**{"routing.iterations": "3"}), tmp_path, epochs_before)
    assert weights_equal(tmp_path / "whole", tmp_path / "stopped")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"early_epochs": "4"}, "early_epochs must be smaller than epochs=4; got 4"),
        ({"early_epochs": "-1"}, "early_epochs must be an integer of at least 0; got -1"),
        ({"early_iterations": "0"}, "early_iterations must be an integer from 1 to 1,000; got 0"),
    ],
)
def test_schedules_out_of_range_are_refused(changes, message):
    with pytest.raises(BadInput, match=message):
        recipe_of(**changes)


def test_a_rule_without_iterations_is_refused():
    with pytest.raises(BadInput, match="no routing rule of model capsnet has iterations: set early_epochs=0"):
        new_module(recipe_of(**{"model.routing": "uniform"}), even_digits())
