"""Matrix capsule network and the paper's baseline CNN: Hinton, Sabour & Frosst 2018."""

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn

from torchcaps.capsules import Prediction, wide
from torchcaps.checks import check_channels, check_choice, check_integer, check_number, check_sizes
from torchcaps.decoder import prediction_of
from torchcaps.errors import BadInput
from torchcaps.layers import ClassCaps, ConvCaps, truncated_normal_
from torchcaps.models.image_shape import check_image_shape, check_images
from torchcaps.models.pretrained import Pretrained
from torchcaps.primary import PrimaryCaps
from torchcaps.routing import EMRouting, Routing, Rule, with_defaults

Size = Literal["small", "base"]
WIDTHS: dict[str, tuple[int, int, int, int]] = {"small": (64, 8, 16, 16), "base": (32, 32, 32, 32)}
"""For each size: output channels of the convolution, then capsule types of the primary and the two ConvCaps layers."""

EM = Routing("em", variance_floor=0.01, initial_beta_a=-15.0, inverse_temperature=1.0)
"""Default routing of `MatrixCapsNet`.

The variance floor is 0.01, because the initial poses of the network are very small. With a floor of 1e-4, all couplings
after the first iteration would be close to 0 or 1, and a network with three iterations would hardly learn. The initial
β_a is -15. Networks that start with β_a = 0 have one of two problems: the scores of wrong classes do not fall below
1/2, or all scores start so close to 1 that the network does not learn.
"""


class MatrixCapsNet(Pretrained):
    """Matrix capsule network: convolution, primary capsules, two convolutional capsule layers and class capsules.

    Hinton, Sabour & Frosst 2018, figure 1: convolution 5×5×A stride 2 with ReLU → B primary capsules per position →
    ConvCaps 3×3 stride 2, C types → ConvCaps 3×3 stride 1, D types → one capsule per class. The option ``size`` or
    ``widths`` sets A, B, C and D. The activation of a class capsule is the score of the class. On stereo images with
    five classes, ``small`` has 68,618 parameters and ``base`` 316,650. Without a stem, no layer is padded, so on 32×32
    images the last three rows and columns have no effect.

    Arguments:
        image_shape: (channels, height, width); at least 17×17 pixels, or 21×21 with ``stem_stride=2``.
        num_classes: number of classes.
        size: ``small`` sets (A, B, C, D) to (64, 8, 16, 16), ``base`` sets them to (32, 32, 32, 32).
        widths: four numbers (A, B, C, D) that replace the numbers of ``size``.
        pose: ``matrix`` for 4×4 poses with 4×4 transforms, ``vector`` for 16-D poses with 16×16 transforms.
        coordinates: use Coordinate Addition in the class capsules. The coordinates are the centres of the receptive
            fields, as fractions of the image's height and width.
        stem: number of extra 3×3 convolutions after the first convolution. With ``stem_stride=1``, the extra
            convolutions keep the number of channels and the resolution. With a stem or with ``normalise``, BatchNorm
            follows every convolution.
        stem_stride: stride of the middle convolution of the stem, 1 or 2. If ``stem`` is even, this is the later of
            the two middle ones. With ``stem_stride=2``, this convolution doubles the channels, the first ConvCaps layer
            has stride 1 instead of 2, and the network has a quarter as many primary capsules as with
            ``stem_stride=1``.
        normalise: use BatchNorm without learned parameters on poses and activation logits of the primary capsules.
        routing: routing rule of every layer: a name in `ROUTINGS`, a `Routing` (name and options), or a module, which
            is copied for each layer. For ``"em"``, two defaults differ from `EMRouting`: ``variance_floor=0.01`` and
            ``initial_beta_a=-15``.
        class_temperature_factor: factor by which the inverse temperature λ of the class capsules is multiplied, only
            for ``"em"``; 1/4 in the authors' code.
        primary_initial_std: standard deviation of the initial weights that compute the poses of the primary capsules;
            None for PyTorch's default. The authors' code uses 0.5.
        activation_initial_std: standard deviation of the initial weights that compute the activations of the primary
            capsules; None for PyTorch's default. The authors' code uses 3, but only for 2 of 32 capsule types, and it
            subtracts 1 from the activation logits.
        initial_std: standard deviation of the initial transforms of the ConvCaps layers; 0.3 in the authors' code.
        class_initial_std: standard deviation of the initial transforms of the class capsules; 0.01 in the authors'
            code.
        around_identity: True: initialise each transform as the identity matrix plus noise; False: as noise alone, as in
            the authors' code.

    Raises:
        BadInput: the image is too small for the kernels; an option has an invalid value; the routing or one of its
            options is unknown; or ``class_temperature_factor`` is not 1 and ``routing`` is neither ``"em"`` nor
            a `Routing` with this name.
        ValueError: ``num_classes`` is below 1; a standard deviation is negative or not finite; an option of the rule is
            out of its range; or the rule is a module that was created for a layer with other sizes.

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
        routing: Rule | Routing | str = EM,
        class_temperature_factor: float = 1.0,
        primary_initial_std: float | None = None,
        activation_initial_std: float | None = None,
        initial_std: float = 0.1,
        class_initial_std: float = 0.1,
        around_identity: bool = True,
    ) -> None:
        super().__init__()
        channels, height, width = self.image_shape = check_image_shape(
            "MatrixCapsNet", image_shape, smallest=21 if stem_stride == 2 else 17
        )
        for option, value, allowed in (("size", size, get_args(Size)), ("pose", pose, ("matrix", "vector"))):
            check_choice(option, value, allowed, BadInput)
        if widths is not None and (len(widths) != 4 or min(widths) < 1):
            example = list(WIDTHS[size])
            raise BadInput(f"widths must be four integers of at least 1, such as {example}; got {list(widths)}")
        features, primary, first, second = WIDTHS[size] if widths is None else widths
        pose_size = (4, 4) if pose == "matrix" else (1, 16)
        routing = class_routing = with_defaults(routing, EM)
        if class_temperature_factor != 1:
            if not isinstance(routing, Routing) or routing.name != "em":
                raise BadInput(
                    f"class_temperature_factor is {class_temperature_factor}: set it to 1, or choose EM routing by "
                    "name, as routing='em' or routing=Routing('em')"
                )
            inverse_temperature = class_temperature_factor * routing.options["inverse_temperature"]
            class_routing = routing.replace(inverse_temperature=inverse_temperature)
        check_integer("stem", stem, 0, 100, BadInput)
        if stem_stride not in (1, 2) or stem < stem_stride - 1:
            raise BadInput(f"stem_stride must be 1, or 2 with a stem of at least 1; got {stem_stride} and stem={stem}")
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
        self._primary_stds = {
            "primary_initial_std": primary_initial_std,
            "activation_initial_std": activation_initial_std,
        }
        self.reset_parameters()
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

    def _set_changes(self, changes: Mapping[str, Any]) -> None:
        rule, others, routing = self.class_capsules.routing, self.second_capsules.routing, changes.get("routing")
        changed = isinstance(routing, Routing) and "inverse_temperature" in routing.options
        changed = changed or "class_temperature_factor" in changes
        if changed and isinstance(rule, EMRouting) and isinstance(others, EMRouting):
            rule.inverse_temperature = self.options["class_temperature_factor"] * others.inverse_temperature

    def reset_parameters(self) -> None:
        """Draw new initial weights of the primary capsules with ``primary_initial_std`` and ``activation_initial_std``.

        The layers of the network have methods of the same name: use ``network.apply`` to reset all of them.
        """
        for layer, (name, std) in zip(
            (self.primary_capsules.convolution, self.primary_capsules.activation),
            self._primary_stds.items(),
            strict=True,
        ):
            if layer is not None and std is not None:
                truncated_normal_(layer.weight, std, name)

    def forward(
        self, images: Float[Tensor, "B channels height width"], labels: Integer[Tensor, "B"] | None = None
    ) -> Prediction:
        """Predict scores in [0, 1] and class capsules. The labels are not used."""
        check_images(images, self.image_shape)
        capsules = self.primary_capsules(self.convolution(images))
        capsules = self.class_capsules(self.second_capsules(self.first_capsules(capsules)))
        return prediction_of(capsules)


def _receptive_field_centres(
    sites: int, pixels: int, kernels: Iterable[tuple[int, int, int]]
) -> Float[Tensor, " sites"]:
    """Compute the centre of each site's receptive field along one axis, as a fraction of the image side in [0, 1].

    Arguments:
        sites: number of sites along this axis.
        pixels: number of image pixels along this axis.
        kernels: (kernel_size, stride, padding) of each layer, starting with the first layer.
    """
    first, step = 0.0, 1
    for kernel_size, stride, padding in kernels:
        first += step * ((kernel_size - 1) / 2 - padding)
        step *= stride
    return (first + 0.5 + step * torch.arange(sites, device="cpu")) / pixels


class MatrixBaselineCNN(Pretrained):
    """Baseline CNN of the matrix capsule paper: two 5×5 convolutions with max-pooling and a hidden linear layer.

    Hinton, Sabour & Frosst 2018, section 5: convolutions with 32 and 64 channels, each followed by 2×2 max-pooling; a
    linear layer with 1024 units; dropout; and softmax cross-entropy. The convolutions have padding 2, which keeps the
    image size. With this padding, the network has 4,253,349 parameters on 32×32 stereo images with five classes; the
    paper reports 4.2M.

    Arguments:
        image_shape: (channels, height, width); with two convolutions, at least 4×4 pixels.
        num_classes: number of classes.
        channels: output channels of the convolutions.
        hidden_size: units of the hidden linear layer.
        dropout: dropout probability after the hidden layer, in [0, 1).

    Raises:
        BadInput: the image is too small for the pooling.
        ValueError: a size is below 1, ``channels`` is empty, or ``dropout`` is not in [0, 1).

    Example:
        >>> import torch
        >>> MatrixBaselineCNN(hidden_size=32)(torch.rand(2, 1, 28, 28)).scores.shape
        torch.Size([2, 10])
    """

    logits = True

    def __init__(
        self,
        image_shape: Sequence[int] = (1, 28, 28),
        num_classes: int = 10,
        channels: Sequence[int] = (32, 64),
        hidden_size: int = 1024,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        check_sizes(num_classes=num_classes, hidden_size=hidden_size)
        check_channels("channels", channels)
        check_number("dropout", dropout, "[0, 1)")
        shrunk = 2 ** len(channels)
        image_channels, height, width = self.image_shape = check_image_shape("MatrixBaselineCNN", image_shape, shrunk)
        layers: list[nn.Module] = []
        for below, above in zip([image_channels, *channels], channels, strict=False):
            layers += [nn.Conv2d(below, above, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
        layers += [nn.Flatten(), nn.Linear(channels[-1] * (height // shrunk) * (width // shrunk), hidden_size)]
        self.layers = nn.Sequential(*layers, nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden_size, num_classes))

    def forward(
        self, images: Float[Tensor, "B channels height width"], labels: Integer[Tensor, "B"] | None = None
    ) -> Prediction:
        """Predict scores, which are logits. The labels are not used."""
        check_images(images, self.image_shape)
        return Prediction(wide(self.layers(images)))
