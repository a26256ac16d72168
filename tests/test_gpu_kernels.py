"""The Triton kernels against the reference: on a GPU where there is one, else in Triton's interpreter on the CPU."""

import os
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch

from problems import MAPS as ALL_MAPS
from problems import far, full_problem
from torchcaps import Capsules, RoutingMap, dynamic_routing, em_routing

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
BACKENDS = ("fused", "reference")
MAPS = {
    "dense": RoutingMap.dense(3),
    "shared": RoutingMap.shared(5),
    "conv": RoutingMap.conv((3, 2), 3, padding=1, stride=2),
    **{name: ALL_MAPS[name] for name in ("one-parent", "irregular", "no-edges")},
}
POSES = {"matrix": (4, 4, 4), "vector": (1, 3, 5)}
DYNAMIC = {
    "sabour": {},
    "su": {"logits": "latest", "squash_form": "su", "inner_squash_form": "unit"},
    "leaky": {"leaky": True, "inner_squash_form": "none", "iterations": 4},
    "last-gradient": {"gradient_passes": "last"},
}


@pytest.fixture(scope="module")
def device():
    """Where the kernels run. The interpreter reads their source: they are imported without what the run-time check of
    types puts around a function."""
    if torch.cuda.is_available():
        return "cuda"
    finders = sys.meta_path[:]
    sys.meta_path[:] = [finder for finder in finders if "jaxtyping" not in type(finder).__module__]
    for rule in ("em", "dynamic"):
        import_module(f"torchcaps.kernels.gpu.{rule}")
    sys.meta_path[:] = finders
    return "cpu"


class Interpreted(torch.autograd.Function):
    """An operator as it runs on a GPU, on the CPU."""

    @staticmethod
    def forward(ctx, rule, edges, parent_sites, options, *leaves):
        ctx.kernels = import_module(f"torchcaps.kernels.gpu.{rule}")
        *outputs, kept, log_sums = ctx.kernels.forward(*leaves, edges, parent_sites, *options)
        ctx.edges, ctx.options = edges, options
        ctx.save_for_backward(*leaves, kept, log_sums)
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *gradients):
        *leaves, kept, log_sums = ctx.saved_tensors
        return (
            None,
            None,
            None,
            None,
            *ctx.kernels.backward(*leaves, ctx.edges, kept, log_sums, *gradients, *ctx.options),
        )


def em(leaves, routing_map, iterations, parent_activation="logistic", backend="fused"):
    pose, activation, transform, *betas = leaves
    if backend == "reference" or pose.is_cuda:
        options = {"iterations": iterations, "parent_activation": parent_activation, "backend": backend}
        return em_routing(Capsules(pose, activation), transform, routing_map, *betas, **options)
    data = routing_map.child_sites * transform.shape[1] / (routing_map.parent_sites * transform.shape[2])
    options = ([1 - 0.95 ** (t + 1) for t in range(iterations)], 1e-4, data, parent_activation == "mixing")
    return Interpreted.apply("em", routing_map.edges, routing_map.parent_sites, options, *leaves)


def dynamic(
    leaves,
    routing_map,
    iterations=3,
    logits="cumulative",
    squash_form="sabour",
    inner_squash_form="sabour",
    gradient_passes="all",
    leaky=False,
    backend="fused",
):
    forms = (squash_form, inner_squash_form)
    if backend == "reference" or leaves[0].is_cuda:
        options = (iterations, logits, gradient_passes, *forms, leaky)
        names = ("iterations", "logits", "gradient_passes", "squash_form", "inner_squash_form", "leaky")
        return [dynamic_routing(*leaves, routing_map, **dict(zip(names, options, strict=True)), backend=backend).pose]
    options = (iterations, logits == "cumulative", *forms, gradient_passes == "all", leaky)
    return Interpreted.apply("dynamic", routing_map.edges, routing_map.parent_sites, options, *leaves)


def everything(rule, tensors, routing_map, device, dtype=torch.float64, **options):
    """Outputs and the gradients of all tensors, of a random weighting."""
    leaves = [x.to(device, dtype, copy=True).requires_grad_() for x in tensors]
    outputs = rule(leaves, replace(routing_map, edges=routing_map.edges.to(device)), **options)
    random = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=random, dtype=torch.float64).to(x) for x in outputs]
    sum((x * weight).sum() for x, weight in zip(outputs, weights, strict=True)).backward()
    gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    return [x.detach().double().cpu() for x in (*outputs, *gradients)]


def problem(routing_map, parent_types, pose):
    pose, *others = full_problem(routing_map, parent_types, POSES[pose], child_types=2, batch=2)
    return 0.5 * pose, *others


@pytest.mark.parametrize(
    ("routing_map", "pose", "parent_types", "iterations"),
    [
        *(("dense", "matrix", 1, 3), ("shared", "vector", 17, 2), ("conv", "matrix", 5, 3), ("conv", "vector", 3, 1)),
        *(("one-parent", "vector", 3, 3), ("irregular", "vector", 3, 3), ("no-edges", "vector", 3, 2)),
    ],
)
def test_em_equals_the_reference(device, routing_map, pose, parent_types, iterations):
    case, routing_map = problem(MAPS[routing_map], parent_types, pose), MAPS[routing_map]
    for parent_activation in ("logistic", "mixing"):
        options = {"iterations": iterations, "parent_activation": parent_activation}
        both = [everything(em, case, routing_map, device, **options, backend=b) for b in BACKENDS]
        for found, right in zip(*both, strict=True):
            torch.testing.assert_close(found, right, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize(
    ("routing_map", "options"), [*((name, "sabour") for name in MAPS), *(("conv", options) for options in DYNAMIC)]
)
def test_dynamic_equals_the_reference(device, routing_map, options):
    case, routing_map = problem(MAPS[routing_map], 3, "vector")[::2][:2], MAPS[routing_map]
    both = [everything(dynamic, case, routing_map, device, **DYNAMIC[options], backend=b) for b in BACKENDS]
    for found, right in zip(*both, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_children_have_float32_statistics(device, dtype):
    case = [x.to(dtype).double() for x in problem(MAPS["conv"], 5, "matrix")]
    for rule, tensors in ((em, case), (dynamic, (case[0], case[2]))):
        options = {"iterations": 2}
        exact = everything(rule, tensors, MAPS["conv"], device, **options, backend="reference")
        narrow = everything(rule, tensors, MAPS["conv"], device, dtype, **options)
        assert all(far(x, y) < (1e-4 if dtype == torch.float32 else 1e-2) for x, y in zip(narrow, exact, strict=True))


@pytest.mark.parametrize("faint", [1e-20, 1e-30, 1e-37])
def test_faint_children_have_their_mean(device, faint):
    pose, activation, *others = problem(MAPS["conv"], 5, "vector")
    activation[0, :, :], activation[1, ::2] = faint * activation[0].clamp_min(0.2), faint * activation[1, ::2]
    case = (pose, activation.float().double(), *others)
    for parent_activation in ("logistic", "mixing"):
        options = {"iterations": 2, "parent_activation": parent_activation}
        exact = everything(em, case, MAPS["conv"], device, **options, backend="reference")
        found = everything(em, case, MAPS["conv"], device, torch.float32, **options)
        kept = (0, 1, 2, *((3,) if faint > 1e-37 else ()), 4, 5, 6)
        assert all(far(found[part], exact[part]) < 1e-3 for part in kept)


def test_an_empty_batch_has_no_gradients(device):
    case = problem(MAPS["conv"], 5, "matrix")
    found = everything(em, (case[0][:0], case[1][:0], *case[2:]), MAPS["conv"], device, iterations=2)
    assert found[0].shape[0] == 0
    assert not any(x.any() for x in found)


@pytest.mark.parametrize(("rule", "children", "parent_types"), [("em", "*bf16", 5), ("dynamic", "*fp32", 16)])
def test_they_compile_for_gpus(rule, children, parent_types, tmp_path):
    """Down to machine code, without a GPU: the interpreter lets more pass than the compiler."""
    script = """
import sys
from importlib import import_module

import torch
from triton import JITFunction
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from torchcaps.kernels.gpu.problem import shape_of

rule, children, parent_types = sys.argv[1:]
shape = shape_of(torch.empty(8, 9, 2, 4, 4), torch.empty(9, 2, int(parent_types), 4, 4), 4, 2)
constants = {"z": shape, "is_first": False, "is_leaky": False, "all_passes": True}
constants |= {"pass_index": 1} if rule == "dynamic" else {}
kinds = dict.fromkeys(("pose", "activation", "transform"), children)
kinds |= dict.fromkeys(("begin", "parent_site_of", "child_site_of", "kernel_of"), "*i32")
kinds |= dict.fromkeys(("samples", "pass_index", "group_count"), "i32") | dict.fromkeys(constants, "constexpr")
built = 0
for name, kernel in vars(import_module(f"torchcaps.kernels.gpu.{rule}")).items():
    if isinstance(kernel, JITFunction) and name.startswith(("_find_", "_gather_", "_undo_")):
        names = [parameter.name for parameter in kernel.params]
        signature = {name: kinds.get(name, "*fp32") for name in names}
        fixed = {(names.index(name),): value for name, value in constants.items() if name in names}
        built += bool(compile(ASTSource(kernel, signature, fixed), target=GPUTarget("cuda", 90, 32)).asm["cubin"])
assert built == 6
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", script, rule, children, str(parent_types)]
    subprocess.run(command, check=True, env={**environment, "TRITON_CACHE_DIR": str(tmp_path)})
