"""Check that a compiled network has the gradients of the network without compilation."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy

import torch
from torch import Tensor

from torchcaps.batches import split_into_batches
from torchcaps.capsules import Prediction
from torchcaps.data import Splits
from torchcaps.devices import is_memory_error, training_device
from torchcaps.errors import BadInput, first_line
from torchcaps.split_batches import SplitBatches
from torchcaps.training_module import TrainingModule

CALLS = 3
"""Number of steps of the compiled network until its gradients are compared.

On a GPU, the first two calls record CUDA graphs, and the third call replays them, as all later calls do.
"""
TOLERANCE = 0.002
"""Accepted difference of a gradient, relative to its norm, in addition to rounding errors."""
SMALLEST_SHARE = 0.01
"""Differences of a gradient whose norm is a smaller share of the norm of all gradients are relative to this share.

For example, the gradient of a bias before BatchNorm consists only of rounding errors.
"""


def check_compiled(module: TrainingModule, splits: Splits) -> None:
    """Check that compilation does not change the gradients of a network, except for rounding errors.

    Some versions of PyTorch compile some networks wrongly, without an error: for example, pytorch/pytorch#185702. The
    check uses the first and the last training batch, because the last one can be smaller, and PyTorch compiles the
    network for each size of a batch. The gradients are compared with gradients in float64, computed on the CPU. The
    difference of the compiled network may be three times the difference of the network without compilation, plus 0.2 %
    of the norm of the gradient.

    Dropout is off in the check. The module is not changed. Functions that the process has compiled before are compiled
    again in their next call.

    Arguments:
        module: model, loss and recipe, before the training.
        splits: training, validation and test images.

    Raises:
        BadInput: PyTorch cannot compile the network to one graph, or a gradient differs by more.
    """
    device, recipe = training_device(), module.recipe
    batches, order = SplitBatches(splits, recipe).epoch(0)
    parts = split_into_batches(order, recipe.batch_size)
    different = {len(part): part for part in (parts[0], parts[-1])}.values()
    copy = deepcopy(module).to(device).train()
    for layer in copy.modules():
        if "drop" in type(layer).__name__.lower():  # the random numbers of dropout and stochastic depth would differ
            layer.eval()
    exact = deepcopy(copy).to("cpu", torch.float64)
    with compiling():
        for early in {False, recipe.early_epochs > 0}:
            copy.set_iterations(early=early)
            exact.set_iterations(early=early)
            for part in different:
                _check_gradients(copy, exact, *batches.load(part, device))


@contextmanager
def compiling() -> Iterator[None]:
    """Raise `BadInput` if PyTorch cannot compile a network; at the end, free the memory of all compiled networks."""
    try:
        yield
    except RuntimeError as error:
        if is_memory_error(error):
            raise
        raise BadInput(
            f"compile is true, but torch.compile cannot compile this network ({first_line(error)}): start a new run "
            "with compile=false"
        ) from error
    finally:
        torch.compiler.reset()


def _check_gradients(module: TrainingModule, exact: TrainingModule, images: Tensor, labels: Tensor) -> None:
    right = _gradients(exact, exact.model, images.to("cpu", torch.float64), labels.cpu())
    with module.autocast(images.device.type):
        plain = _gradients(module, module.model, images, labels)
        for _ in range(CALLS):
            found = _gradients(module, module.compiled_model(), images, labels)
    whole = torch.stack([gradient.norm() for gradient in right.values()]).norm()
    for name, gradient in right.items():
        unit = torch.maximum(gradient.norm(), SMALLEST_SHARE * whole)
        apart, rounding = ((one[name] - gradient).norm().div(unit).item() for one in (found, plain))
        if not apart <= 3 * rounding + TOLERANCE:
            raise BadInput(
                f"compile is true, but torch.compile of PyTorch {torch.__version__} computes a wrong gradient of the "
                f"weights {name} (the difference is {apart:.2%}, and {rounding:.2%} without compilation): start "
                "a new run with compile=false, or use another version of PyTorch"
            )


def _gradients(
    module: TrainingModule, network: Callable[..., Prediction], images: Tensor, labels: Tensor
) -> dict[str, Tensor]:
    """Compute the gradients of the loss, keyed by the names of the weights. They are returned on the CPU in float64."""
    weights = {name: one for name, one in module.model.named_parameters() if one.requires_grad}
    loss = module.loss_of(network(images, labels), images, labels, train=True)
    with torch.autocast(images.device.type, enabled=False):
        found = torch.autograd.grad(loss, [*weights.values()], allow_unused=True, materialize_grads=True)
    return {name: gradient.to("cpu", torch.float64) for name, gradient in zip(weights, found, strict=True)}
