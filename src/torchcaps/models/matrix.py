"""The matrix-capsule network and the baseline it was measured against: Hinton, Sabour & Frosst 2018."""

from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from torchcaps.capsules import Prediction
from torchcaps.decoder import prediction_of
from torchcaps.errors import BadInput
from torchcaps.layers import ClassCaps, ConvCaps, PrimaryCaps, truncated_normal_
from torchcaps.models.image_shape import check_image_shape
from torchcaps.models.pretrained import Pretrained
from torchcaps.routing import Routing, with_defaults

Size = Literal["small", "base"]
WIDTHS: dict[str, tuple[int, int, int, int]] = {"small": (64, 8, 16, 16), "base": (32, 32, 32, 32)}
"""Size → channels of the convolution, then capsule types of the primary and the two convolutional layers."""

EM = Routing("em", variance_floor=0.01, initial_beta_a=-15.0, inverse_temperature=1.0)
"""`MatrixCapsNet`'s own defaults. Its initial poses are so small that with a floor of 1e-4 the first couplings are near
0 or 1, and more so with every iteration; the third then hardly learns. With β_a = 0 the scores of wrong classes do not
fall below 1/2, or all begin so near 1 that nothing is learned."""


class MatrixCapsNet(nn.Module, Pretrained):
    """Convolution, primary capsules, two convolutional capsule layers, class capsules; by EM or any other routing.

    Hinton, Sabour & Frosst 2018, figure 1, ``[A, B, C, D]``: conv 5×5×A stride 2 ReLU → B primary capsules at each
    position → ConvCaps 3×3 stride 2, C types → ConvCaps 3×3 stride 1, D types → one class capsule a class, whose
    activation is the class's score. On stereo images of five classes ``small`` has 68,618 parameters and ``base``
    316,650. Without a stem, no layer is padded: no class capsule sees the last three rows and columns of 32×32 pixels.

    Arguments:
        image_shape: (channels, height, width); at least 17×17.
        num_classes: number of classes.
        size: ``small``, 64/8/16/16, or ``base``, 32/32/32/32.
        widths: (A, B, C, D) of your own, in place of a size.
        pose: ``matrix``, 4×4 with 4×4 transforms, or ``vector``, 16 with 16×16 transforms.
        coordinates: Coordinate Addition at the class capsules.
        stem: further convolutions 3×3×A behind the first, which keep its grid. With a stem or with `normalise`,
            BatchNorm follows every convolution.
        stem_stride: 1 or 2. With 2, the middle one of these convolutions halves the grid and doubles the channels, and
            the first capsule layer halves nothing: a deeper front, and a quarter of the primary capsules.
        normalise: BatchNorm without weights of its own on the poses and activation logits of the primary capsules.
        routing: of every layer: a rule, of which each layer gets a copy, its name in `ROUTINGS`, or a `Routing`: name
            and options. Options of ``"em"`` that are left out are those of `EM`.
        class_temperature_factor: for ``"em"``: λ of the class capsules as a multiple of the others'; the authors' code
            has 1/4.
        primary_initial_std, activation_initial_std: standard deviations of the initial weights of the primary poses and
            activations; None for PyTorch's own. The authors' code has 0.5 and 3.
        initial_std, class_initial_std: standard deviations of the initial transforms, convolutional and class.
        around_identity: whether the initial transforms are the identity plus noise, or noise alone; see `ConvCaps`. The
            authors' code has noise alone, of 0.3 and 0.01.

    Raises:
        BadInput: the image is too small for the kernels; an unknown size, pose, routing or option of it; or a
            class_temperature_factor for another rule than ``"em"``.
        ValueError: a rule that does not fit a layer.

    Example:
        >>> import torch
        >>> MatrixCapsNet(image_shape=(2, 32, 32), num_classes=5)(torch.rand(2, 2, 32, 32)).scores.shape
        torch.Size([2, 5])
    """

    def __init__(
        self,
        image_shape: Sequence[int] = (1, 28, 28),
        num_classes: int = 10,
        size: Size = "small",
        widths: Sequence[int] | None = None,
        pose: Literal["matrix", "vector"] = "matrix",
        coordinates: bool = True,
        stem: int = 0,
        stem_stride: int = 1,
        normalise: bool = False,
        routing: nn.Module | Routing | str = EM,
        class_temperature_factor: float = 1.0,
        primary_initial_std: float | None = None,
        activation_initial_std: float | None = None,
        initial_std: float = 0.1,
        class_initial_std: float = 0.1,
        around_identity: bool = True,
    ) -> None:
        super().__init__()
        channels, height, width = check_image_shape(
            "MatrixCapsNet", image_shape, smallest=21 if stem_stride == 2 else 17
        )
        for option, value, allowed in (("size", size, get_args(Size)), ("pose", pose, ("matrix", "vector"))):
            if value not in allowed:
                raise BadInput(f"{option} is {value!r}: use one of {', '.join(allowed)}")
        if widths is not None and (len(widths) != 4 or min(widths) < 1):
            raise BadInput(f"widths are {list(widths)}: give four numbers, such as {list(WIDTHS[size])}")
        features, primary, first, second = WIDTHS[size] if widths is None else widths
        pose_size = (4, 4) if pose == "matrix" else (1, 16)
        routing = class_routing = with_defaults(routing, EM)
        if class_temperature_factor != 1:
            if not isinstance(routing, Routing) or routing.name != "em":
                raise BadInput(
                    f"class_temperature_factor is {class_temperature_factor}: only routing 'em', by name, has one; "
                    "leave it at 1"
                )
            inverse_temperature = class_temperature_factor * routing.options["inverse_temperature"]
            class_routing = routing.replace(inverse_temperature=inverse_temperature)
        if stem < 0:
            raise BadInput(f"stem is {stem}: give the number of convolutions, 0 or more")
        if stem_stride not in (1, 2) or stem < stem_stride - 1:
            raise BadInput(f"stem_stride is {stem_stride}, stem {stem}: use stride 1, or 2 with a stem of 1 or more")
        convolutions: list[nn.Module] = [nn.Conv2d(channels, features, 5, stride=2)]
        for index in range(stem):
            below, stride = features, stem_stride if index == stem // 2 else 1
            features *= stride
            convolutions += [nn.BatchNorm2d(below), nn.ReLU(), nn.Conv2d(below, features, 3, stride, padding=1)]
        norm = [nn.BatchNorm2d(features)] if stem or normalise else []
        self.convolution = nn.Sequential(*convolutions, *norm, nn.ReLU())
        self.primary_capsules = PrimaryCaps(
            *(features, primary, pose_size, 1),
            bias=False,
            squash_form="none",
            activation="sigmoid",
            normalise="plain" if normalise else "none",
        )
        for layer, std in (
            (self.primary_capsules.convolution, primary_initial_std),
            (self.primary_capsules.activation, activation_initial_std),
        ):
            if layer is not None and std is not None:
                truncated_normal_(layer.weight, std)
        grid = (((height - 5) // 2) // stem_stride + 1, ((width - 5) // 2) // stem_stride + 1)
        self.first_capsules = ConvCaps(
            *(grid, primary, first, 3),
            stride=2 // stem_stride,
            pose_size=pose_size,
            initial_std=initial_std,
            around_identity=around_identity,
            routing=deepcopy(routing),
        )
        self.second_capsules = ConvCaps(
            self.first_capsules.parent_grid,
            *(first, second, 3),
            pose_size=pose_size,
            initial_std=initial_std,
            around_identity=around_identity,
            routing=deepcopy(routing),
        )
        kernels = ((5, 2, 0), (3, stem_stride, 1), (3, 2 // stem_stride, 0), (3, 1, 0))
        rows, columns = (
            _receptive_field_centres(sites, pixels, kernels)
            for sites, pixels in zip(self.second_capsules.parent_grid, (height, width), strict=True)
        )
        self.class_capsules = ClassCaps(
            torch.cartesian_prod(rows, columns),
            second,
            num_classes,
            pose_size=pose_size,
            add_coordinates=coordinates,
            initial_std=class_initial_std,
            around_identity=around_identity,
            routing=deepcopy(class_routing),
        )

    def forward(
        self, images: Float[Tensor, "B channels height width"], labels: Int64[Tensor, "B"] | None = None
    ) -> Prediction:
        """Scores in [0, 1] and class capsules. Labels are accepted, as by every model, and not used."""
        capsules = self.primary_capsules(self.convolution(images))
        capsules = self.class_capsules(self.second_capsules(self.first_capsules(capsules)))
        return prediction_of(capsules)


def _receptive_field_centres(
    sites: int, pixels: int, kernels: Iterable[tuple[int, int, int]]
) -> Float[Tensor, " sites"]:
    """Along one axis, the centre of each site's receptive field as a share of the image.

    Arguments:
        sites, pixels: in the last grid and in the image.
        kernels: size, stride and padding, layer by layer.
    """
    first, step = 0.0, 1
    for kernel_size, stride, padding in kernels:
        first += step * ((kernel_size - 1) / 2 - padding)
        step *= stride
    return (first + 0.5 + step * torch.arange(sites, device="cpu")) / pixels


class MatrixBaselineCNN(nn.Module, Pretrained):
    """The paper's convolutional baseline: two 5×5 convolutions with max-pooling and a hidden linear layer.

    Hinton, Sabour & Frosst 2018, section 5: 32 and 64 channels, each pooled by 2, 1024 units, dropout, softmax
    cross-entropy. The paper's 4.2M parameters on 32×32 stereo images come out only where the convolutions keep the
    image's size (padding 2): 4,253,349.

    Arguments:
        image_shape: (channels, height, width); at least 4×4.
        num_classes: number of classes.
        channels: of the two convolutions.
        hidden_size: units of the hidden linear layer.
        dropout: share of its units switched off in training, in [0, 1).

    Raises:
        BadInput: the image is too small for the pooling.

    Example:
        >>> import torch
        >>> MatrixBaselineCNN(hidden_size=32)(torch.rand(2, 1, 28, 28)).scores.shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        image_shape: Sequence[int] = (1, 28, 28),
        num_classes: int = 10,
        channels: Sequence[int] = (32, 64),
        hidden_size: int = 1024,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        image_channels, height, width = check_image_shape("MatrixBaselineCNN", image_shape, smallest=4)
        layers: list[nn.Module] = []
        for below, above in zip([image_channels, *channels], channels, strict=False):
            layers += [nn.Conv2d(below, above, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
        shrunk = 2 ** len(channels)
        layers += [nn.Flatten(), nn.Linear(channels[-1] * (height // shrunk) * (width // shrunk), hidden_size)]
        self.layers = nn.Sequential(*layers, nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden_size, num_classes))

    def forward(
        self, images: Float[Tensor, "B channels height width"], labels: Int64[Tensor, "B"] | None = None
    ) -> Prediction:
        """Scores are logits. Labels are accepted, as by every model, and not used."""
        return Prediction(self.layers(images).float())
