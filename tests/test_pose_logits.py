"""Logits that depend on the poses of the children: the fused kernels against the reference and against loops."""

from functools import partial
from itertools import product

import pytest
import torch

from conftest import on_every_instruction_set
from problems import MAPS, far, full_problem
from torchcaps import Agreement, RoutingMap, Votes

POSES = {"matrix": (4, 4, 4), "vector": (1, 8, 16), "odd": (3, 2, 5)}


def case_of(routing_map, pose, parent_types, batch=5):
    """Pose, activation, transform and logit weights, in float64."""
    children, activation, transform, *_ = full_problem(routing_map, parent_types, POSES[pose], batch=batch)
    weights = torch.randn(*transform.shape[:3], POSES[pose][0] * POSES[pose][1] + 1).double()
    return [0.5 * children, activation, 0.5 * transform, 0.5 * weights]


def everything(case, routing_map, route, dtype=torch.float64, **options):
    """Return the outputs of a function of the votes, and the gradients of a random sum of them for all inputs."""
    leaves = [x.to(dtype).clone().requires_grad_() for x in case]
    outputs = [*route(Votes(*leaves[:3], routing_map, logit_weights=leaves[3], **options))]
    random = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=random, dtype=torch.float64).to(x) for x in outputs]
    loss = sum((x * weight).sum() for x, weight in zip(outputs, weights, strict=True))
    return [x.detach() for x in (*outputs, *torch.autograd.grad(loss, leaves))]


def once(votes):
    return votes.moments(variance=False)


def several_times(votes):
    first = votes.moments()
    second = votes.moments(Agreement(linear=first.mean), variance=False)
    agreement = Agreement(centre=first.mean + second.mean, variance=first.variance, variance_floor=0.1)
    return *second, *votes.moments(agreement)


@pytest.mark.parametrize("routing_map", ["dense", "conv", "irregular"])
@pytest.mark.parametrize(("pose", "route"), [*product(POSES, (once, several_times))])
def test_the_kernels_equal_the_reference(routing_map, pose, route):
    for parent_types, dtype in ((3, torch.float64), (17, torch.float64), (16, torch.float32)):
        for options in ({"competition": "types"}, {"none_of_the_above": True}):
            case = case_of(MAPS[routing_map], pose, parent_types)
            run = partial(everything, case, MAPS[routing_map], route, passes=3, **options)
            right = run(backend="reference")
            for found in on_every_instruction_set(lambda run=run, dtype=dtype: run(dtype=dtype)).values():
                assert max(map(far, found, right)) < (1e-9 if dtype == torch.float64 else 1e-4)


def test_the_couplings_equal_a_softmax_of_pose_times_weights():
    pose, activation, transform, weights = case_of(RoutingMap.dense(3), "odd", 4)
    logits = torch.einsum("bkcn,kcjn->bjkc", torch.nn.functional.pad(pose.flatten(3), (0, 1), value=1.0), weights)
    right = logits.softmax(dim=1)
    for backend in ("fused", "reference"):
        votes = Votes(pose, activation, transform, RoutingMap.dense(3), "types", backend=backend, logit_weights=weights)
        torch.testing.assert_close(votes.couplings(), right)
        torch.testing.assert_close(votes.moments().mass, (right * activation[:, None]).sum(dim=(2, 3))[:, None])
        torch.testing.assert_close(votes.materialised()[:, :, 0, 0], pose[:, None, 0, 0] @ transform[0, 0])


def test_weights_that_do_not_fit_are_refused(untyped):
    pose, activation, transform, weights = case_of(RoutingMap.dense(3), "odd", 4)
    votes = partial(Votes, pose, activation, transform, RoutingMap.dense(3))
    for wrong in (weights[..., :-1], weights[:, :, :1], [1.0], weights.long()):
        with pytest.raises(ValueError, match="logit_weights"):
            votes(logit_weights=wrong)
