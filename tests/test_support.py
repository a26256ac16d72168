"""The support of classes with self-routing, and in the layers below the class capsules."""

import torch
from torch import nn

from test_inspection import classifier
from torchcaps import Routing
from torchcaps.inspection import _support_below
from torchcaps.recording import recorded


@torch.no_grad()
def test_support_with_self_routing_is_the_share_of_the_mass():
    model = classifier("capsnet", routing="self_routing").model
    for parameter in model.class_capsules.routing.parameters():
        nn.init.normal_(parameter)
    with recorded(model) as layers:
        model(torch.rand(1, 1, 28, 28))
    (layer,) = layers
    found = layer.passes[0]
    mass = found.votes.weights(found.agreement)[0]
    torch.testing.assert_close(layer.support(0), mass / mass.sum(dim=(1, 2), keepdim=True))


@torch.no_grad()
def test_support_is_passed_down_with_the_couplings_of_the_last_pass_of_each_layer():
    model = classifier("matrix-capsnet", routing=Routing("em", iterations=2)).model
    with recorded(model) as layers:
        model(torch.rand(1, 1, 28, 28))
    found = _support_below(layers)
    for number in range(2):
        relevance = layers[-1].support(number).clone()
        for layer in layers[-2::-1]:
            last, edges = layer.passes[-1], layer.routing_map.edges
            shares = last.votes.weights(last.agreement)[0] / last.moments.mass[0].mT[:, edges[:, 1], None]
            given = torch.zeros(3, *layer.children.activation.shape[1:])
            for edge, (child, parent, _) in enumerate(edges.tolist()):
                given[:, child] += relevance[:, parent] @ shares[:, edge]
            relevance = given
        torch.testing.assert_close(found[number], relevance.sum(dim=2), rtol=1e-4, atol=1e-6)
