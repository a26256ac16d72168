"""Rules compute the same parents from matrix poses and from vector poses with the same votes."""

import pytest
import torch

from torchcaps import ROUTINGS, Capsules, RoutingMap
from torchcaps.routing import LayerShape

ROWS, BELOW, ABOVE = 3, 2, 4


@pytest.mark.parametrize("name", [name for name in ROUTINGS if name != "self_routing"])
def test_a_matrix_pose_gives_the_parents_of_the_same_numbers_as_a_vector(name):
    """Every row of a matrix is multiplied by the same transform. Self-routing has other weights for matrices."""
    matrices = torch.randn(3, 9, 2, ROWS, BELOW, dtype=torch.double)
    activation, routing_map = torch.rand(3, 9, 2, dtype=torch.double), RoutingMap.conv((3, 3), kernel_size=2)
    transform = torch.randn(4, 2, 5, BELOW, ABOVE, dtype=torch.double)
    each_row = torch.einsum("rs,kcjqn->kcjrqsn", torch.eye(ROWS, dtype=torch.double), transform)
    vectors = matrices.flatten(3).unsqueeze(3)
    cases = [
        (matrices, transform, (ROWS, BELOW), (ROWS, ABOVE)),
        (vectors, each_row.reshape(4, 2, 5, ROWS * BELOW, ROWS * ABOVE), (1, ROWS * BELOW), (1, ROWS * ABOVE)),
    ]
    found = []
    for pose, transforms, below, above in cases:
        torch.manual_seed(0)
        rule = ROUTINGS[name].for_layer(LayerShape(4, 2, 5, below, above)).double()
        for parameter in rule.parameters():
            torch.nn.init.normal_(parameter)
        found.append(rule(Capsules(pose, activation), transforms, routing_map))
    torch.testing.assert_close(found[0].pose.flatten(3), found[1].pose.flatten(3))
    torch.testing.assert_close(found[0].activation, found[1].activation)
