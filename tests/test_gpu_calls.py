"""Calls of the Triton kernels by rules, by the compiler, and without PyTorch's dispatcher."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from gpu_problems import POSES, SMALL, problem
from problems import far, full_problem
from torchcaps import Capsules, DynamicRouting, EMRouting, dynamic_routing, em_routing
from torchcaps.kernels import _cpu
from torchcaps.kernels import moments as operators
from torchcaps.kernels.memory import for_kernels, has_strides, sample_stride, samples_last_strides
from torchcaps.kernels.record import Record

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


@pytest.mark.skipif(_cpu is None and not torch.cuda.is_available(), reason="the operators are not built")
def test_rules_equal_the_reference(device):
    """The rules call `Votes`, as in a layer."""
    tensors, results = full_problem(SMALL, 3, POSES["vector"], child_types=2, batch=2), []
    for backend, where in (("fused", device), ("reference", "cpu")):
        leaves = [x.to(where, copy=True).requires_grad_() for x in tensors]
        pose, activation, transform, *betas = leaves
        routing_map = replace(SMALL, edges=SMALL.edges.to(where))
        by_em = em_routing(Capsules(0.3 * pose, activation), transform, routing_map, *betas, backend=backend)
        by_agreement = dynamic_routing(pose, transform, routing_map, leaky=True, backend=backend)
        (by_em.pose.square().sum() + by_em.activation.sum() + by_agreement.pose[..., 0].sum()).backward()
        outputs = (*by_em, by_agreement.pose)
        results.append([x.detach().cpu() for x in (*outputs, *(leaf.grad for leaf in leaves))])
    for found, right in zip(*results, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-7, atol=1e-8)


def passes_of_em(tensors, device, backend):
    """The parents of EM routing, and the gradients of children and transforms."""
    pose, activation, transform, *betas = (x.to(device) for x in tensors)
    leaves = [x.detach().requires_grad_() for x in (pose, activation, transform)]
    routing_map = replace(SMALL, edges=SMALL.edges.to(device))
    parents = em_routing(Capsules(*leaves[:2]), leaves[2], routing_map, *betas, backend=backend)
    found = torch.autograd.grad(parents.pose.double().square().sum() + parents.activation.double().sum(), leaves)
    return [x.detach().double().cpu() for x in (*parents, *found)]


@pytest.mark.skipif(_cpu is None and not torch.cuda.is_available(), reason="the operators are not built")
def test_half_precision_without_the_dispatcher_equals_the_reference(direct):
    tensors = [x.bfloat16() for x in full_problem(SMALL, 3, POSES["vector"], child_types=2, batch=2)]
    for found, right in zip(
        passes_of_em(tensors, direct, "fused"), passes_of_em(tensors, "cpu", "reference"), strict=True
    ):
        assert far(found, right) < 0.02


@pytest.mark.skipif(_cpu is None and not torch.cuda.is_available(), reason="the operators are not built")
@pytest.mark.parametrize("rule", [DynamicRouting, EMRouting])
def test_couplings_of_half_precision_children_have_gradients(direct, rule):
    pose, activation, transform, *_ = (
        x.to(direct).bfloat16() for x in full_problem(SMALL, 3, POSES["vector"], child_types=2, batch=2)
    )
    pose.requires_grad_()
    kinds = {"parent_types": 3} if rule is EMRouting else {}
    results = []
    for backend in ("fused", "reference"):
        routing = rule(**kinds, backend=backend).to(direct)
        _, couplings = routing(Capsules(pose, activation), transform, SMALL, return_couplings=True)
        assert couplings.dtype == torch.float32
        results += [couplings.detach().cpu(), torch.autograd.grad(couplings.square().sum(), pose)[0].float().cpu()]
    torch.testing.assert_close(results[0], results[2], rtol=0.02, atol=0.02)
    assert far(results[1], results[3]) < 0.05


@pytest.mark.skipif(_cpu is None and not torch.cuda.is_available(), reason="the operators are not built")
def test_negative_views_equal_the_reference(direct):
    tensors = full_problem(SMALL, 3, POSES["vector"], child_types=2, batch=1)
    negative = [torch._neg_view(-x.to(direct)) for x in tensors]
    for found, right in zip(
        passes_of_em(negative, direct, "fused"), passes_of_em(tensors, "cpu", "reference"), strict=True
    ):
        torch.testing.assert_close(found, right, rtol=1e-7, atol=1e-8)


def a_pass(device, batch=2):
    """The arguments of the operators: layer, options, all arguments of `moments`, and the tensors of a `Record`."""
    case, options = problem(SMALL, batch=batch), (False, True, False)
    pose, activation, transform, *agreement = (x.to(device) for x in case.values())
    layer = pose, activation, transform, SMALL.edge_lists.on(pose.device), SMALL.parent_sites
    forward = [], *layer, *agreement, 0.1, 0.5, False, *options, True, False, 0.1
    mass, mean, variance, largest, log_mass, log_sums, volume = operators.on_gpu("moments", *forward)
    nothing, numbers = mean.new_empty(0), torch.tensor([0.1, 0.1, 0.5], dtype=mean.dtype, device=device)
    record = [*agreement, log_sums, nothing, mean, largest, log_mass, variance, mass, mean, variance, volume, numbers]
    return layer, options, forward, record


@pytest.mark.parametrize("batch", [1, 3])
def test_outputs_have_the_shapes_and_strides_that_the_compiler_expects(device, batch):
    def on_meta(x):
        return [on_meta(y) for y in x] if isinstance(x, list) else x.to("meta") if isinstance(x, torch.Tensor) else x

    layer, options, forward, record = a_pass(device, batch)
    pose, agreement = layer[0], record[:4]
    calls = {
        "moments": forward,
        "moments_backward": (*layer, record, *options, True),
        "votes_backward": (*layer, record, *options),
        "couplings": (pose, *layer[2:], *agreement, 0.1, 0.5, *options),
    }
    for name, arguments in calls.items():
        found = operators.on_gpu(name, *arguments)
        expected = getattr(torch.ops.torchcaps, name)(*map(on_meta, arguments))
        for one, right in zip(*((x,) if isinstance(x, torch.Tensor) else x for x in (found, expected)), strict=True):
            assert (one.shape, one.stride(), one.dtype) == (right.shape, right.stride(), right.dtype), name


def test_the_memory_of_a_record_may_change_between_its_two_uses(device):
    """The code that torch.compile generates copies tensors of a record, and overwrites the memory of the originals."""
    layer, options, _, record = a_pass(device)
    place, found = Record._fields.index("coupling_grads"), []
    for overwritten, direct in ((False, True), (False, False), (True, False)):
        used, kept = ([x.clone() for x in record] for _ in range(2))
        kept[place], *_ = operators.on_gpu("moments_backward", *layer, used, *options, True, direct=direct)
        for x in used if overwritten else ():
            x.fill_(float("nan"))
        found.append(operators.on_gpu("votes_backward", *layer, kept, *options, direct=direct))
    for right, *others in zip(*found, strict=True):
        for other in others:
            torch.testing.assert_close(other, right, rtol=0, atol=0)


@pytest.mark.parametrize("batch", [1, 32, 33])
def test_poses_prepared_for_a_gpu_need_no_copy(batch):
    pose = for_kernels(torch.empty(batch, 2, 3, 4, 4, device="meta"))
    assert has_strides(pose, samples_last_strides((sample_stride(batch), 2, 3, 4, 4)))
