"""Recipes for your own images. All of them have the same preprocessing, optimiser, batch size and number of epochs."""

from dataclasses import replace

from torchcaps.recipe import Recipe
from torchcaps.recipes.matrix_capsules import BATCH_NORM_IMAGES, with_variational_bayes


def capsnet_images() -> Recipe:
    """CapsNet on your own images; give the folder of images with ``--data``.

    The batches are small, and the learning rate is 2e-4. With few classes, the paper's learning rate of 1e-3 saturates
    the class capsules within the first steps: a class capsule sums the votes of thousands of primary capsules, and
    every training step changes all these votes. CapsNet has separate transforms for each position, so its number of
    parameters grows with the image; for images above about 64×64 pixels, use `matrix_capsnet_images`.
    """
    return Recipe(
        name="capsnet-images",
        model="capsnet",
        data="images",
        reconstruction_weight=0.0005,
        shift=2,
        learning_rate=2e-4,
        batch_size=16,
        epochs=30,
        batch_norm_images=BATCH_NORM_IMAGES,
    )


def matrix_capsnet_images() -> Recipe:
    """Matrix capsules on your own images of at least 21×21 pixels; give the folder of images with ``--data``.

    Network, loss and routing are as in `matrix_capsnet_toys`. Preprocessing, optimiser, batch size and number of epochs
    are as in `capsnet_images`; the learning rate rises in the first epoch and then falls along a cosine. Positions
    share their transforms, so the number of parameters does not depend on the size of the images.
    """
    return replace(
        capsnet_images(),
        name="matrix-capsnet-images",
        model="matrix-capsnet",
        model_options={"widths": [64, 16, 16, 16], "stem": 3, "stem_stride": 2, "normalise": True},
        routing_options={"iterations": 3, "variance_floor": 0.3, "initial_beta_a": 0.0, "tempering": 0.25},
        loss="activation_logit_cross_entropy",
        reconstruction_weight=0.0,
        learning_rate=1e-3,
        schedule="cosine",
        warm_up_epochs=1.0,
    )


def variational_capsnet_images() -> Recipe:
    """Matrix capsules with variational Bayes routing on your own images; give the folder of images with ``--data``.

    Only routing and initial transforms differ from `matrix_capsnet_images`. In the experiment ``own-images``, with
    1,000 training images, this network is more accurate than `matrix_capsnet_images` on Fashion-MNIST and on the toys.
    """
    return replace(with_variational_bayes(matrix_capsnet_images()), name="variational-capsnet-images")


def cnn_images() -> Recipe:
    """CNN baseline on your own images, for comparison with capsules; give the folder of images with ``--data``.

    The network is the CNN of `cnn_baseline_toys`; the other settings are as in `matrix_capsnet_images`.
    """
    return replace(
        matrix_capsnet_images(),
        name="cnn-images",
        model="matrix-baseline-cnn",
        model_options={},
        routing_options={},
        loss="cross_entropy",
    )


def residual_capsnet_images() -> Recipe:
    """Residual network with a capsule head on your own images; give the folder of images with ``--data``.

    Before the capsules, the network halves the height and width of the feature map three times, so it also suits large
    images. The other settings are as in `matrix_capsnet_images`.
    """
    return replace(
        matrix_capsnet_images(),
        name="residual-capsnet-images",
        model="residual-capsnet",
        model_options={},
        routing_options={},
    )


def timm_capsnet_images() -> Recipe:
    """Capsules on a network of timm, on your own images; give the folder of images with ``--data``.

    ``--set model.backbone=NAME`` chooses the network of timm. ``--from timm`` starts from the weights that timm
    publishes for this network, and ``--from FILE.safetensors`` from weights on disk. Without ``--from``, the initial
    weights are random. With ``--set model.freeze_backbone=true``, only the capsules are trained. The other settings are
    those of `residual_capsnet_images`.
    """
    return replace(residual_capsnet_images(), name="timm-capsnet-images", model="timm-capsnet")
