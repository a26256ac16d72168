"""Recipes of the networks that came with a routing rule of their own: self-routing, attention, generative."""

from dataclasses import replace

from torchcaps.recipe import Recipe


def self_routing_capsnet_smallnorb() -> Recipe:
    """Self-routing capsules on smallNORB: Hahn, Pyeon & Kim 2019, "7-layer CNN".

    The authors' network, loss, optimiser, batch, crops and contrast. Their brightness is a factor, here a number is
    added; they take one image of a stereo pair, here both. They take 200 epochs, in which a rate of 0.1 falls in steps;
    here 20, along a cosine.
    """
    return Recipe(
        name="self-routing-capsnet-smallnorb",
        model="self-routing-capsnet",
        data="smallnorb",
        loss="activation_cross_entropy",
        crop=32,
        brightness=32 / 255,
        contrast=0.3,
        optimizer="sgd",
        learning_rate=0.1,
        weight_decay=1e-4,
        schedule="cosine",
        batch_size=64,
        epochs=20,
    )


def self_routing_capsnet_toys() -> Recipe:
    """The same on the rendered toys."""
    return replace(self_routing_capsnet_smallnorb(), name="self-routing-capsnet-toys", data="toys")


def self_routing_capsnet_cifar10() -> Recipe:
    """The same network on CIFAR-10, which the authors put on a ResNet-20; shifted, mirrored, standardised."""
    return replace(
        self_routing_capsnet_smallnorb(),
        name="self-routing-capsnet-cifar10",
        data="cifar-10",
        standardise="last",
        crop=0,
        brightness=0.0,
        contrast=0.0,
        shift=4,
        flip=True,
    )


def self_routing_capsnet_fashion_mnist() -> Recipe:
    """The same network with twice the channels and half the capsule types on Fashion-MNIST; shifted and mirrored.

    Adam in place of SGD, which learns more slowly here. A network of 1.8 MB: ``--set model.width=16 --set
    model.types=12``.
    """
    return replace(
        self_routing_capsnet_cifar10(),
        name="self-routing-capsnet-fashion-mnist",
        data="fashion-mnist",
        model_options={"width": 32, "types": 16},
        standardise="none",
        shift=2,
        optimizer="adam",
        learning_rate=3e-3,
        weight_decay=1e-5,
        epochs=24,
    )


def attention_capsnet_cifar10() -> Recipe:
    """Capsules with inverted dot-product attention on CIFAR-10: Tsai et al. 2020, simple backbone.

    The authors' network, optimiser, batch and augmentation; images are standardised one by one, not by the mean of the
    dataset. They take 350 epochs, in which a rate of 0.1 falls twice by 10; here 20, along a cosine.
    """
    return Recipe(
        name="attention-capsnet-cifar10",
        model="attention-capsnet",
        data="cifar-10",
        loss="activation_logit_cross_entropy",
        standardise="last",
        shift=4,
        flip=True,
        optimizer="sgd",
        learning_rate=0.1,
        weight_decay=5e-4,
        schedule="cosine",
        batch_size=128,
        epochs=20,
    )


def generative_capsnet_smallnorb() -> Recipe:
    """Objects routed from parts on smallNORB at its full size: Heinsen 2019.

    The author's network, optimiser, batch and length. His one-cycle schedule is a rise over a tenth of the epochs and a
    cosine here; his mixup takes a share for each image, here a batch has one. His shifts by cropping are left out.
    """
    return Recipe(
        name="generative-capsnet-smallnorb",
        model="generative-capsnet",
        data="smallnorb",
        loss="activation_logit_cross_entropy",
        data_options={"size": 96},
        mixup=0.2,
        optimizer="radam",
        learning_rate=5e-4,
        schedule="cosine",
        warm_up_epochs=5.0,
        batch_size=20,
        epochs=50,
    )


def generative_capsnet_toys() -> Recipe:
    """The same on the rendered toys, 48×48 pixels, in 10 epochs."""
    return replace(
        generative_capsnet_smallnorb(),
        name="generative-capsnet-toys",
        data="toys",
        data_options={},
        warm_up_epochs=1.0,
        epochs=10,
    )
