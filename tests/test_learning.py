"""A network learns to classify digits with every routing rule."""

import pytest
import torch

from torchcaps import ROUTINGS, CapsNet
from torchcaps.data import load_mnist_5k
from torchcaps.losses import activation_logit_cross_entropy

STEPS, BATCH = 60, 32


@pytest.fixture(scope="module")
def digits():
    return load_mnist_5k()


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("rule", ROUTINGS)
def test_a_network_learns_digits_with_every_rule(rule, digits):
    train, test = digits
    torch.manual_seed(0)
    model = CapsNet((1, 28, 28), 10, convolution_channels=32, primary_types=4, decoder=False, routing=rule)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for chosen in torch.randperm(len(train))[: STEPS * BATCH].split(BATCH):
        loss = activation_logit_cross_entropy(model(train.pixels[chosen] / 255).scores, train.labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.inference_mode():
        predicted = model.eval()(test.pixels[:500] / 255).scores.argmax(dim=1)
    assert (predicted == test.labels[:500]).float().mean() > 0.7  # chance: 0.1
