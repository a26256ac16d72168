"""Faster convolutions: the memory format of their weights, and convolution computed as a matrix product."""

from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from torchcaps.checks import check_padding, check_sizes
from torchcaps.kernels import in_torch_func

Network = TypeVar("Network", bound=nn.Module)


def use_channels_last(model: nn.Module) -> None:
    """Convert the weights of all convolutions of a model to the memory format channels_last."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):  # contiguous() would leave the weights for grey images as they are
            module.weight.data = module.weight.data.clone(memory_format=torch.channels_last)


def kaiming_(module: Network, zero_bias: bool = False) -> Network:
    """Draw the weights of all convolutions of a module as in He et al. 2015, for ReLU, and return the module.

    Arguments:
        module: a convolution, or a module that contains convolutions.
        zero_bias: set their biases to 0; otherwise, the biases stay as they are.
    """
    for convolution in module.modules():
        if isinstance(convolution, nn.Conv2d):
            nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
            if zero_bias and convolution.bias is not None:
                nn.init.zeros_(convolution.bias)
    return module


class Im2colConv2d(nn.Conv2d):
    """2D convolution computed as one matrix product of all patches and the weights.

    Chellapilla, Puri & Simard 2006, section 3. On some CPUs it is faster than `torch.nn.Conv2d`. It computes the same
    results, and its weights have the same names and shapes. It uses more memory, because it saves the patches for the
    backward pass. For a batch of B images, the patches contain B · height · width · in_channels · kernel_size² numbers,
    where height and width are the size of the output.

    Arguments:
        in_channels: number of channels in the input.
        out_channels: number of channels in the output.
        kernel_size: height and width of the kernel.
        stride: stride of the convolution.
        padding: zero padding on all four sides of the input.
        bias: add a learned bias to the output.

    Raises:
        ValueError: ``kernel_size`` or ``stride`` is not an integer of at least 1, or ``padding`` is not an integer of
            at least 0.

    Example:
        >>> Im2colConv2d(256, 256, kernel_size=9, stride=2)(torch.randn(1, 256, 20, 20)).shape
        torch.Size([1, 256, 6, 6])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        padding: int = 0,
        bias: bool = True,
    ) -> None:
        check_sizes(kernel_size=kernel_size, stride=stride)
        check_padding(padding)
        super().__init__(in_channels, out_channels, kernel_size, stride, padding, bias=bias)

    def forward(
        self, input: Float[Tensor, "B in_channels height width"]
    ) -> Float[Tensor, "B out_channels new_height new_width"]:
        """Compute the convolution; the output is in channels_last memory format."""
        around = [int(p) for p in self.padding for _ in range(2)]
        extract = _patches if in_torch_func() else _Patches.apply
        patches = extract(functional.pad(input, around), self.kernel_size[0], self.stride[0])
        return functional.linear(patches.flatten(3), self.weight.permute(0, 2, 3, 1).flatten(1), self.bias).permute(
            0, 3, 1, 2
        )


def _patches(images: Tensor, size: int, stride: int) -> Tensor:
    """Extract patches: ``[B, channels, height, width]`` → ``[B, new height, new width, kernel, kernel, channels]``."""
    patches = images.permute(0, 2, 3, 1).unfold(1, size, stride).unfold(2, size, stride)
    return patches.permute(0, 1, 2, 4, 5, 3).contiguous()


class _Patches(torch.autograd.Function):
    """The function `_patches` with a fast backward. It does not support torch.func and forward-mode differentiation."""

    @staticmethod
    def forward(images: Tensor, size: int, stride: int) -> Tensor:
        return _patches(images, size, stride)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int, int], output: Tensor) -> None:
        ctx.image_shape, ctx.stride = inputs[0].shape, inputs[2]

    @staticmethod
    def backward(ctx: Any, patches: Tensor) -> tuple[Tensor, None, None]:
        batch, channels, *grid = ctx.image_shape
        images = patches.new_zeros(batch, *grid, channels)
        reach = [ctx.stride * (count - 1) + 1 for count in patches.shape[1:3]]
        for y in range(patches.shape[3]):
            for x in range(patches.shape[4]):
                images[:, y : y + reach[0] : ctx.stride, x : x + reach[1] : ctx.stride] += patches[:, :, :, y, x]
        return images.permute(0, 3, 1, 2), None, None
