"""Benchmark of published PyTorch implementations beside fused routing, on the same inputs.

torchcaps does not contain their code: the files are read from clones of the repositories. Fused routing has the options
with which it computes the same values and gradients as the published implementation.
"""

import hashlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.abc import SourceLoader
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.func import functional_call

from torchcaps.benchmarks import DEVICE, SCALE
from torchcaps.benchmarks.routing import ITERATIONS, Problem, check_agreement, dynamic_layer, em_stack, times_of
from torchcaps.capsules import Capsules
from torchcaps.errors import BadInput
from torchcaps.routing import (
    AttentionRouting,
    GenerativeRouting,
    SelfRouting,
    VariationalBayesRouting,
    dynamic_routing,
    em_routing,
)
from torchcaps.routing_map import RoutingMap

Way = Callable[[], list[Tensor]]


class Source(NamedTuple):
    """Files of a published implementation.

    Arguments:
        repository: OWNER/NAME on GitHub.
        commit: commit of the files.
        files: path of each file in the repository, and its SHA-256 checksum.
    """

    repository: str
    commit: str
    files: dict[str, str]

    def load(self, clones: Path) -> list[ModuleType]:
        """Run the files of a clone in the folder ``clones``, and return them as modules."""
        clone = clones / self.repository.split("/")[1]
        return [self._module(clone, path, checksum) for path, checksum in self.files.items()]

    def _module(self, clone: Path, path: str, checksum: str) -> ModuleType:
        file = clone / path
        try:
            content = file.read_bytes()
        except OSError as error:
            raise BadInput(
                f"--clones: {file} cannot be read ({error.strerror}): git clone https://github.com/{self.repository} "
                f"into {clone.parent}"
            ) from error
        if hashlib.sha256(content).hexdigest() != checksum:
            raise BadInput(
                f"--clones: {file} is not the file of commit {self.commit}: git checkout {self.commit} in {clone}"
            )
        module, unused = ModuleType(file.stem), ModuleType("utils")
        unused.squash = None  # type: ignore[attr-defined]
        with patch.dict(sys.modules, {"utils": unused}):  # SR-CapsNet imports it for dynamic routing
            _Checked(content, str(file)).exec_module(module)
        return module


class _Checked(SourceLoader):
    """Loader of a file whose content is given: neither the file nor its compiled copy in __pycache__ is read again."""

    def __init__(self, content: bytes, path: str) -> None:
        self.content, self.path = content, path

    def get_data(self, path: str) -> bytes:
        return self.content

    def get_filename(self, fullname: str) -> str:
        return self.path


@contextmanager
def _without_gpu() -> Iterator[None]:
    """Let code that asks for a GPU run on the CPU, if there is no GPU."""
    if DEVICE == "cuda":
        yield
        return
    with (
        patch.object(torch.cuda, "FloatTensor", torch.FloatTensor),
        patch.object(Tensor, "cuda", lambda tensor: tensor),
    ):
        yield


def _normal(*shape: int, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape, device=DEVICE)).requires_grad_()


def _em(modules: list[ModuleType], batch: int) -> tuple[list[Tensor], Way, Way]:
    """Two ConvCaps layers. In the published code, the activations of the children cancel, so ours are all 1."""
    pose, _, *parameters = em_stack(batch).leaves
    stack = []
    for size, stride, leaves in ((14, 2, parameters[:3]), (6, 1, parameters[3:])):
        layer = modules[0].ConvCaps(*leaves[0].shape[1:3], K=3, stride=stride, iters=ITERATIONS).to(DEVICE)
        stack.append((layer, leaves, RoutingMap.conv((size, size), 3, stride)))

    def fused() -> list[Tensor]:
        capsules = Capsules(pose, pose.new_ones(pose.shape[:3]))
        for _, (transform, beta_u, beta_a), routing_map in stack:
            capsules = em_routing(
                capsules._replace(activation=pose.new_ones(capsules.pose.shape[:3])),
                transform,
                routing_map,
                beta_u,
                beta_a,
                iterations=ITERATIONS,
                competition="types",
                variance_floor=1e-8,
                normalise_data=False,
                inverse_temperature=1e-3,
                temperature_schedule="constant",
                backend="fused",
            )
        return [*capsules]

    def published() -> list[Tensor]:
        values = torch.cat([pose.flatten(2), pose.new_ones(pose.shape[:3])], dim=2).unflatten(1, (14, 14))
        for layer, (transform, beta_u, beta_a), _ in stack:
            own = {"weights": transform.flatten(0, 1)[None], "beta_u": beta_u, "beta_a": beta_a}
            values = functional_call(layer, own, values)
        types = values.shape[3] // 17
        found, activation = values.flatten(1, 2).split([16 * types, types], dim=2)
        return [found.unflatten(2, (types, 4, 4)), activation]

    return [pose, *parameters], fused, published


def _dynamic(modules: list[ModuleType], batch: int) -> tuple[list[Tensor], Way, Way]:
    """The class capsules of CapsNet. The published code computes gradients through the last iteration only."""
    pose, transform = dynamic_layer(batch).leaves
    routing_map, layer = RoutingMap.dense(36), modules[0].DenseCapsule(1152, 8, 10, 16, routings=ITERATIONS).to(DEVICE)

    def fused() -> list[Tensor]:
        options: Any = {"iterations": ITERATIONS, "gradient_passes": "last", "backend": "fused"}
        return [dynamic_routing(pose, transform, routing_map, **options).pose]

    def published() -> list[Tensor]:
        own = {"weight": transform.flatten(0, 1).permute(1, 0, 3, 2)}
        return [functional_call(layer, own, pose.flatten(1, 3))[:, None, :, None]]

    return [pose, transform], fused, published


def _attention(modules: list[ModuleType], batch: int) -> tuple[list[Tensor], Way, Way]:
    """The class capsules of CapsNet, with two iterations. The published code has no activations."""
    pose, transform = dynamic_layer(batch).leaves
    routing_map, rule = RoutingMap.dense(36), AttentionRouting(16).to(DEVICE)
    layer = modules[0].CapsuleFC(1152, 8, 10, 16, matrix_pose=False, dp=0.0).to(DEVICE)
    assert rule.norm is not None
    rule.backend = "fused"
    norm = [nn.init.normal_(x, 1.0, 0.1) for x in rule.norm.parameters()]
    activation = pose.new_ones(pose.shape[:3])

    def fused() -> list[Tensor]:
        return [rule(Capsules(pose, activation), transform, routing_map).pose]

    def published() -> list[Tensor]:
        own = {"w": transform.flatten(0, 1).transpose(1, 2)}
        own |= {"nonlinear_act.weight": norm[0], "nonlinear_act.bias": norm[1]}
        children = pose.flatten(1, 3)
        found: Any = None
        for iteration in range(rule.iterations):
            found = functional_call(layer, own, (children, iteration, found))
        return [found[:, None, :, None]]

    return [pose, transform, *norm], fused, published


def _self_routing(modules: list[ModuleType], batch: int) -> tuple[list[Tensor], Way, Way]:
    """Two layers of capsules whose poses are vectors, as in the published code."""
    pose, activation = _normal(batch, 196, 8, 1, 16), torch.rand(batch, 196, 8, device=DEVICE).requires_grad_()
    stack, leaves = [], [pose, activation]
    for size, stride, below, above in ((14, 2, 8, 16), (6, 1, 16, 16)):
        rule = SelfRouting(9, below, above, (1, 16)).to(DEVICE)
        rule.backend = "fused"
        for parameter in rule.parameters():
            nn.init.normal_(parameter, std=0.1)
        layer = modules[0].SelfRouting2d(below, above, 16, 16, stride=stride, padding=0, pose_out=True).to(DEVICE)
        transform = _normal(9, below, above, 16, 16, scale=0.25)
        stack.append((rule, layer, transform, RoutingMap.conv((size, size), 3, stride)))
        leaves += [transform, *rule.parameters()]

    def fused() -> list[Tensor]:
        capsules = Capsules(pose, activation)
        for rule, _, transform, routing_map in stack:
            capsules = rule(capsules, transform, routing_map)
        return [*capsules]

    def published() -> list[Tensor]:
        active, poses = (x.flatten(2).mT.unflatten(2, (14, 14)) for x in (activation, pose))
        for rule, layer, transform, _ in stack:
            own = {
                "W1": transform.transpose(3, 4).flatten(2, 3).flatten(0, 1),
                "W2": rule.weight[..., 0].flatten(0, 1),
                "b2": rule.bias.flatten(0, 1)[None, None],
            }
            active, poses = functional_call(layer, own, (active, poses))
        found = poses.flatten(2).mT
        return [found.reshape(*found.shape[:2], -1, 1, 16), active.flatten(2).mT]

    return leaves, fused, published


def _variational_bayes(modules: list[ModuleType], batch: int) -> tuple[list[Tensor], Way, Way]:
    """A layer whose children have one parent site each: the published code does not count the sites of a child."""
    pose, activation = _normal(batch, 144, 8, 4, 4), torch.rand(batch, 144, 8, device=DEVICE).requires_grad_()
    transform, routing_map = _normal(9, 8, 16, 4, 4, scale=0.1), RoutingMap.conv((12, 12), 3, 3)
    rule = VariationalBayesRouting(16).to(DEVICE)
    rule.backend = "fused"
    routing, votes = modules
    of_votes = votes.ConvCapsules2d(8, 16, 4, kernel_size=3, stride=3).to(DEVICE)
    layer = routing.VariationalBayesRouting2d(
        8, 16, 4, 3, 3, alpha0=1.0, m0=torch.zeros(16), kappa0=1.0, Psi0=torch.eye(16), nu0=17, iter=ITERATIONS
    ).to(DEVICE)

    def fused() -> list[Tensor]:
        return [*rule(Capsules(pose, activation), transform, routing_map)]

    def published() -> list[Tensor]:
        active, poses = (x.movedim(1, -1).unflatten(-1, (12, 12)) for x in (activation, pose))
        own = {"W_ij": transform.unflatten(0, (3, 3)).permute(2, 3, 4, 5, 0, 1)[None, :, :, None, :, :, None, None]}
        active, poses = layer(*functional_call(of_votes, own, (active, poses)))
        return [poses.flatten(-2).movedim(-1, 1), active.flatten(-2).movedim(-1, 1)]

    return [pose, activation, transform], fused, published


def _generative(modules: list[ModuleType], batch: int) -> tuple[list[Tensor], Way, Way]:
    """A dense layer. The published code takes and returns the logits of activations."""
    pose, logit, transform = _normal(batch, 36, 16, 4, 4), _normal(batch, 36, 16), _normal(36, 16, 10, 4, 4, scale=0.25)
    routing_map, rule = RoutingMap.dense(36), GenerativeRouting(36, 16, 10).to(DEVICE)
    layer = modules[0].GenerativeMatrixRouting(36 * 16, 10, d_cov=4, d_inp=4, d_out=4, n_iters=ITERATIONS).to(DEVICE)
    rule.backend = "fused"
    betas = [nn.init.normal_(x, std=0.1) for x in (rule.beta_use, rule.beta_ignore)]

    def fused() -> list[Tensor]:
        return [*rule(Capsules(pose, logit.sigmoid()), transform, routing_map)]

    def published() -> list[Tensor]:
        own = {"W": transform.flatten(0, 1), "beta_use": betas[0].flatten(0, 1), "beta_ign": betas[1].flatten(0, 1)}
        found, mean, _ = functional_call(layer, own, (logit.flatten(1), pose.flatten(1, 2)))
        return [mean[:, None], found.sigmoid()[:, None]]

    return [pose, logit, transform, *betas], fused, published


PUBLISHED: dict[str, tuple[Source, Callable[[list[ModuleType], int], tuple[list[Tensor], Way, Way]], int]] = {
    "EM, ConvCaps stack": (
        Source(
            "yl-1993/Matrix-Capsules-EM-PyTorch",
            "ca4cd7f",
            {"model/capsules.py": "6ff334a1a7ecbbc3b23a1fca4b21dd14a19130781b248c3e085f989eff5aeaa1"},
        ),
        _em,
        32,
    ),
    "dynamic, 1152 → 10 capsules": (
        Source(
            "XifengGuo/CapsNet-Pytorch",
            "8a5a357",
            {"capsulelayers.py": "99f847ca39fe36645c59dda4c800b01f14b9425a41c29c705d3f9754fe0092a3"},
        ),
        _dynamic,
        100,
    ),
    "attention, 1152 → 10 capsules": (
        Source(
            "apple/ml-capsules-inverted-attention-routing",
            "53899ae",
            {"src/layers.py": "3048f33ad553fea3822a59a587aa554bf3e4949d2e82b865cc5e52bc406a4e66"},
        ),
        _attention,
        100,
    ),
    "self_routing, ConvCaps stack, vector poses": (
        Source(
            "coder3000/SR-CapsNet",
            "7622d38",
            {"modules.py": "9f57660a3b69a6a83f4c77ac4542dc94048ba5f347e99a6b98fa3b1f84015662"},
        ),
        _self_routing,
        32,
    ),
    "variational_bayes, 12×12×8 → 4×4×16 capsules": (
        Source(
            "fabio-deep/Variational-Capsule-Routing",
            "78fb69d",
            {
                "src/vb_routing.py": "20952807cfd6f8759380f213440c8d8b3457dd74ff1e7f5e6d8096672cca150f",
                "src/layers.py": "545d953cc19a2dc5484c86f3b3190dcf1570cf9ba99aaed45a8d17840998fee8",
            },
        ),
        _variational_bayes,
        32,
    ),
    "generative, 576 → 10 capsules": (
        Source(
            "glassroom/heinsen_routing",
            "ac07d88",
            {"heinsen_routing/heinsen_routing.py": "fe775b02b02e98c6946b2886f943d82a3db96445e8816e75fc0bd7b43769d7b3"},
        ),
        _generative,
        32,
    ),
}
"""Cases of `torchcaps bench published`: the source, the function that creates the inputs, and the batch size."""


def published_problem(case: str, modules: list[ModuleType], batch: int) -> Problem:
    """Return the `Problem` of a case in `PUBLISHED`: a published implementation and fused routing, on the same inputs.

    Arguments:
        case: key in `PUBLISHED`.
        modules: the files of the published implementation, see `Source.load`.
        batch: batch size.
    """
    torch.manual_seed(0)
    source, inputs, _ = PUBLISHED[case]
    with _without_gpu():
        leaves, fused, published = inputs(modules, batch)
    there = _without_gpu()(published)
    return Problem(leaves, {"fused": fused, source.repository: there}, [(there, fused)])


def bench_published(repeats: int, clones: Path) -> Iterator[dict[str, Any]]:
    """Time the published implementations and fused routing.

    ``difference`` is the largest difference between the two: the norm of the difference, divided by the norm, for each
    output and each gradient.

    Arguments:
        repeats: number of timed calls per implementation.
        clones: folder that contains clones of the repositories. Their code runs in this process.

    Raises:
        BadInput: a file is missing, or not the file of the expected commit; or a difference is 1 % or more.
    """
    loaded = {case: source.load(clones) for case, (source, _, _) in PUBLISHED.items()}
    for case, modules in loaded.items():
        batch = PUBLISHED[case][2] * SCALE
        problem = published_problem(case, modules, batch)
        difference = check_agreement(case, problem)
        for row in times_of(case, problem, batch, repeats):
            yield {**row, "difference": "" if row["implementation"].startswith("fused") else f"{difference:.0e}"}
