"""Benchmark of training steps with fused routing and with the reference implementation, in float32 and bf16."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from torchcaps.benchmarks import DEVICE, compare
from torchcaps.convolution import use_channels_last
from torchcaps.losses import margin_loss, reconstruction_loss, spread_loss
from torchcaps.models import create_model
from torchcaps.routing import Routing


def bench_training(repeats: int = 10) -> Iterator[dict[str, Any]]:
    """Time a training step of CapsNet on MNIST-sized images, and a step of the small MatrixCapsNet on 32×32 crops.

    On a GPU, the fused steps are also timed with `torch.compile`, which records the network as CUDA graphs.
    """
    capsnet = {
        "fused": capsnet_step("fused"),
        "fused, im2col": capsnet_step("fused", im2col=True),
        "fused, bf16": capsnet_step("fused", bf16=True),
        "reference": capsnet_step("reference"),
        "reference, bf16": capsnet_step("reference", bf16=True),
    }
    matrix = {name: matrix_step(name) for name in ("fused", "reference")}
    if DEVICE == "cuda":
        capsnet["fused, compiled"] = capsnet_step("fused", compiled=True)
        matrix["fused, compiled"] = matrix_step("fused", compiled=True)
    yield from compare("CapsNet, batch 100", capsnet, images=100, repeats=repeats)
    yield from compare("MatrixCapsNet small, batch 64", matrix, images=64, repeats=repeats)


def capsnet_step(
    backend: str, *, bf16: bool = False, im2col: bool = False, compiled: bool = False, batch: int = 100
) -> Callable[[], None]:
    """Return a function that runs a training step of CapsNet: forward, losses, backward and Adam.

    Convolutions use the memory format channels_last.
    """
    torch.manual_seed(0)
    model = create_model("capsnet", routing=Routing("dynamic", backend=backend), im2col=im2col).to(DEVICE)
    use_channels_last(model)
    images = torch.rand(batch, 1, 28, 28, device=DEVICE).to(memory_format=torch.channels_last)
    labels = torch.randint(0, 10, (batch,), device=DEVICE)
    optimizer = torch.optim.Adam(model.parameters())
    if compiled:
        model.compile(mode="reduce-overhead", dynamic=False)

    def step() -> None:
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=bf16):
            prediction = model(images, labels)
            loss = margin_loss(prediction.scores, labels)
            loss = loss + 0.0005 * reconstruction_loss(prediction.reconstruction, images)
        _update(optimizer, loss)

    return step


def matrix_step(backend: str, *, compiled: bool = False, batch: int = 64, **options: Any) -> Callable[[], None]:
    """Return a function that runs a training step of MatrixCapsNet: forward, spread loss, backward and Adam."""
    torch.manual_seed(0)
    options = {"image_shape": (2, 32, 32), "num_classes": 5, **options}
    model: nn.Module = create_model("matrix-capsnet", routing=Routing("em", backend=backend), **options).to(DEVICE)
    images = torch.randn(batch, *options["image_shape"], device=DEVICE)
    labels = torch.randint(0, options["num_classes"], (batch,), device=DEVICE)
    optimizer = torch.optim.Adam(model.parameters())
    if compiled:
        model.compile(mode="reduce-overhead", dynamic=False)

    def step() -> None:
        _update(optimizer, spread_loss(model(images).scores, labels, margin=0.5))

    return step


def _update(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
