"""Recipes of networks of vector capsules, and of the CNNs beside them."""

from dataclasses import replace

from torchcaps.recipe import Recipe


def capsnet_mnist() -> Recipe:
    """CapsNet on MNIST: Sabour, Frosst & Hinton 2017, section 5, with smaller batches and a faster decay.

    The paper's optimiser, shift and losses. It takes batches of 128 and decays by 0.96 every 2,000 steps over a
    training whose length it does not state. Ten epochs need more steps and a rate that is low at their end: batches of
    64, and 0.96 every 160 steps. The paper's own: ``--batch-size 128 --set decay_steps=2000 --epochs 100``.
    """
    return Recipe(
        name="capsnet-mnist",
        model="capsnet",
        data="mnist",
        reconstruction_weight=0.0005,
        shift=2,
        decay_rate=0.96,
        decay_steps=160,
        batch_size=64,
    )


def capsnet_stem_mnist() -> Recipe:
    """CapsNet with a stem of four convolutions, half as wide, on MNIST; a cosine schedule.

    Digits are moved, rotated and squeezed in training.
    """
    return replace(
        capsnet_mnist(),
        name="capsnet-stem-mnist",
        model_options={"convolution_channels": 128, "primary_types": 16, "stem": True},
        rotation=20.0,
        squeeze=0.2,
        schedule="cosine",
        decay_rate=1.0,
        decay_steps=1000,
    )


def capsnet_mnist_5k() -> Recipe:
    """A narrow CapsNet on the 5,000 embedded digits: the demo, made to end in minutes on two cores.

    Half the channels of the paper's net at both convolutions (a quarter of its arithmetic), smaller batches.
    """
    return replace(
        capsnet_mnist(),
        name="capsnet-mnist-5k",
        data="mnist-5k",
        model_options={"convolution_channels": 128, "primary_types": 16},
        batch_size=32,
        decay_steps=12,
        epochs=8,
    )


def capsnet_images() -> Recipe:
    """CapsNet on a folder of your own images: name it with ``--data``.

    Small batches and a rate of 2e-4: a parent sums the votes of thousands of children, all moved by every step, and
    with few classes the paper's 1e-3 overshoots into saturation within the first steps.
    """
    return replace(
        capsnet_mnist(),
        name="capsnet-images",
        data="images",
        batch_size=16,
        learning_rate=2e-4,
        decay_rate=1.0,
        epochs=30,
    )


def capsnet_fashion_mnist() -> Recipe:
    """CapsNet on Fashion-MNIST, with the settings of `capsnet_mnist`."""
    return replace(capsnet_mnist(), name="capsnet-fashion-mnist", data="fashion-mnist")


def efficient_capsnet_mnist() -> Recipe:
    """Efficient-CapsNet on MNIST: Mazzia, Salvetti & Chiaberge 2021, with larger batches and fewer epochs.

    The authors' losses and augmentation, but shifts of up to 2 pixels. They train for 150 epochs with batches of 16,
    and their learning rate falls from 5e-4 by 0.97 per epoch. Here it falls from 5e-3 along a cosine: of 1e-3, 3e-3
    and 8e-3, the larger two had the lower validation loss after 5 epochs. The authors' settings: ``--batch-size 16
    --epochs 150 --lr 5e-4 --set schedule=exponential --set decay_rate=0.97 --set decay_steps=3375``.
    """
    return Recipe(
        name="efficient-capsnet-mnist",
        model="efficient-capsnet",
        data="mnist",
        reconstruction_weight=0.0005,
        shift=2,
        rotation=30.0,
        squeeze=0.25,
        erase=4,
        learning_rate=5e-3,
        schedule="cosine",
        batch_size=64,
        epochs=40,
    )


def efficient_capsnet_fashion_mnist() -> Recipe:
    """Efficient-CapsNet on Fashion-MNIST, with the settings of `efficient_capsnet_mnist`."""
    return replace(efficient_capsnet_mnist(), name="efficient-capsnet-fashion-mnist", data="fashion-mnist")


def cnn_baseline_mnist() -> Recipe:
    """The convolutional baseline on MNIST: Sabour, Frosst & Hinton 2017, section 5; softmax cross-entropy."""
    return replace(
        capsnet_mnist(),
        name="cnn-baseline-mnist",
        model="baseline-cnn",
        loss="cross_entropy",
        reconstruction_weight=0.0,
    )


def pooled_cnn_mnist() -> Recipe:
    """Su's CNN with global pooling on MNIST: Su 2018; ten independent scores, no augmentation.

    The author takes 20 epochs of batches of 128 at a constant 1e-3; here 20 of 64, with a rate that falls to a tenth,
    so that the last epochs settle.
    """
    return Recipe(
        name="pooled-cnn-mnist",
        model="pooled-cnn",
        data="mnist",
        loss_options={"negative_weight": 0.25},
        decay_rate=0.96,
        decay_steps=300,
        batch_size=64,
        epochs=20,
    )


def pooled_capsnet_mnist() -> Recipe:
    """The same convolutions read by shared capsules: Su 2018; as `pooled_cnn_mnist`, in 12 epochs down to 3 %."""
    return replace(pooled_cnn_mnist(), name="pooled-capsnet-mnist", model="pooled-capsnet", decay_steps=120, epochs=12)
