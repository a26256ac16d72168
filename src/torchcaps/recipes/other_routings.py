"""Recipes for networks with self-routing, attention routing and generative routing."""

from dataclasses import replace

from torchcaps.recipe import Recipe


def self_routing_capsnet_smallnorb() -> Recipe:
    """Self-routing capsules on smallNORB: Hahn, Pyeon & Kim 2019, "7-layer CNN".

    Network, loss, optimiser, batch size, crops and contrast follow the authors. There are these differences:

    - A random brightness is added to the pixels; the authors multiply the pixels by a random brightness.
    - The two images of a stereo pair are the channels of one input; in the authors' code, they are separate samples.
    - The learning rate falls from 0.1 along a cosine in 20 epochs; the authors' learning rate falls in steps over 200
      epochs.
    - The initial weights of the convolutions are normally distributed, with PyTorch's default for the primary capsules;
      the authors' are uniformly distributed.
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
    """Self-routing capsules on the rendered toys with the settings of the smallNORB recipe."""
    return replace(self_routing_capsnet_smallnorb(), name="self-routing-capsnet-toys", data="toys")


def self_routing_capsnet_cifar10() -> Recipe:
    """Self-routing capsules on CIFAR-10 with shifts, flips and standardisation.

    The network is the capsule network of `self_routing_capsnet_smallnorb`. The authors use a capsule network based on
    ResNet-20 for CIFAR-10.
    """
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


def self_routing_capsnet_svhn() -> Recipe:
    """Self-routing capsules on SVHN with the settings of `self_routing_capsnet_cifar10`, without flips.

    For SVHN, too, the authors use a capsule network based on ResNet-20.
    """
    return replace(self_routing_capsnet_cifar10(), name="self-routing-capsnet-svhn", data="svhn", flip=False)


def self_routing_capsnet_fashion_mnist() -> Recipe:
    """Self-routing capsules on Fashion-MNIST with shifts and flips.

    The network has twice the channels and half the capsule types of the network for CIFAR-10. The optimiser is Adam,
    because SGD learns more slowly here, and images are not standardised. Only 2 % of the training images are held out,
    and the last epoch is kept. For a network of 1.8 MB, use ``--set model.width=16 --set model.types=12``.
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
        epochs=40,
        validation_fraction=0.02,
        choose="last",
    )


def attention_capsnet_cifar10() -> Recipe:
    """Capsules with inverted dot-product attention on CIFAR-10: Tsai et al. 2020, simple backbone.

    Layer sizes, concurrent routing, optimiser, batch size and augmentation follow the authors. There are three
    differences:

    - A ConvCaps layer reads the pose of each child as a matrix. The released code reshapes windows of children in
      another order, so that its matrices mix elements of several positions.
    - Each image is standardised with its own mean and standard deviation; the authors use those of the dataset, for
      each channel.
    - The learning rate falls from 0.1 along a cosine in 20 epochs; the authors train for 350 epochs and divide the
      learning rate by 10 twice.

    The authors' code keeps the epoch with the best test accuracy. This recipe keeps the epoch with the best validation
    accuracy.
    """
    return Recipe(
        name="attention-capsnet-cifar10",
        model="attention-capsnet",
        data="cifar-10",
        model_options={"concurrent": True},
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


def attention_capsnet_cifar100() -> Recipe:
    """Capsules with inverted dot-product attention on CIFAR-100, with the settings of `attention_capsnet_cifar10`."""
    return replace(attention_capsnet_cifar10(), name="attention-capsnet-cifar100", data="cifar-100")


def generative_capsnet_smallnorb() -> Recipe:
    """Generative routing capsules on smallNORB at its full size of 96×96 pixels: Heinsen 2019.

    Optimiser, batch size, number of epochs and network follow the author; `GenerativeCapsNet` lists the parameters that
    the author's network also has. There are these other differences:

    - The learning rate starts and ends near 0, and its cosine starts at the first step; the author's starts and ends at
      1e-5, and its cosine starts after the warm-up. The author also changes β₁ of the optimiser during training.
    - Mixup draws one mixing proportion per batch; the author draws one mixing proportion per image.
    - This recipe does not shift the images; the author shifts them with random crops.
    - A tenth of the training images is held out to choose the epoch; the author trains on all images.
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
    """Generative routing capsules on the rendered toys of 48×48 pixels, in 10 epochs."""
    return replace(
        generative_capsnet_smallnorb(),
        name="generative-capsnet-toys",
        data="toys",
        data_options={},
        warm_up_epochs=1.0,
        epochs=10,
    )
