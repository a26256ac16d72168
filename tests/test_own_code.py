"""Rules and networks in your own code: hooks, pruning, quantisation, tracing, and mistakes in a rule of your own."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from torchcaps import (
    Agreement,
    BadInput,
    CapsNet,
    CapsuleLayer,
    Capsules,
    DenseCaps,
    DynamicRouting,
    MatrixCapsNet,
    ResidualCapsNet,
    Routing,
    RoutingMap,
    testing,
)
from torchcaps.losses import activation_cross_entropy, cross_entropy
from torchcaps.routing import ROUTINGS, AttentionRouting, Rule, SelfRouting, UniformRouting
from torchcaps.testing import check_rule

pytestmark = pytest.mark.usefixtures("untyped")


def children(batch=2):
    return Capsules(torch.randn(batch, 6, 4, 1, 8), torch.rand(batch, 6, 4))


def layer(routing):
    return DenseCaps(6, 4, 8, parent_types=3, parent_pose_size=5, routing=routing)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_hooks_on_the_modules_of_attention_routing_are_called(dtype):
    one, called = layer("attention"), []
    one.routing.to(dtype)
    for name in ("norm", "score"):
        one.routing.get_submodule(name).register_forward_hook(lambda *_, name=name: called.append(name))
    one(children())
    assert called == ["norm", "norm", "score"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_modules_of_attention_routing_can_be_replaced(dtype):
    inputs, rules = children(), [AttentionRouting(5) for _ in range(2)]
    for rule, one in zip(rules, (torch.float32, dtype), strict=True):
        rule.norm, rule.score = nn.LayerNorm(5, eps=1.0, bias=False), nn.Linear(5, 1, bias=False)
        rule.load_state_dict(rules[0].state_dict())
        rule.to(one)
    transform = torch.randn(6, 4, 3, 8, 5)
    found, right = (rule(inputs, transform, RoutingMap.dense(6)) for rule in rules)
    torch.testing.assert_close(found, right)
    assert (right.pose.std(dim=-1, correction=0) < 0.998).all()  # eps reduces it
    rules[1].norm = nn.RMSNorm(5, dtype=dtype)
    assert rules[1](inputs, transform, RoutingMap.dense(6)).pose.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_attention_routing_can_be_pruned_and_trained(dtype):
    one, inputs = layer("attention"), children()
    one.routing.score.to(dtype)
    prune.l1_unstructured(one.routing.score, "weight", 0.5)
    optimizer = torch.optim.SGD(one.parameters(), 0.1)
    before = one(inputs).activation.detach()
    for _ in range(2):
        optimizer.zero_grad()
        one(inputs).activation.sum().backward()
        optimizer.step()
    assert (one.routing.score.weight == 0).sum() == 2
    assert not torch.equal(one(inputs).activation, before)


@pytest.mark.filterwarnings("ignore")  # torch.ao.quantization is deprecated
def test_attention_routing_can_be_quantized():
    one, inputs = layer("attention").eval(), children()
    small = torch.ao.quantization.quantize_dynamic(one, {nn.Linear})
    assert not isinstance(small.routing.score, nn.Linear)
    torch.testing.assert_close(small(inputs).activation, one(inputs).activation, atol=0.02, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_attention_routing_computes_in_the_dtype_of_the_votes(dtype):
    rule, inputs = AttentionRouting(5), children()
    nn.init.normal_(rule.norm.weight)
    transform = torch.randn(6, 4, 3, 8, 5)
    found = rule.to(dtype)(inputs, transform, RoutingMap.dense(6))
    right = rule.float()(inputs, transform, RoutingMap.dense(6))
    assert found.activation.dtype == torch.float32
    torch.testing.assert_close(found, right)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rule", ROUTINGS)
def test_networks_can_be_traced(rule):
    network = MatrixCapsNet((1, 17, 17), 3, widths=(8, 2, 2, 2), routing=rule).eval().requires_grad_(False)
    images, others = torch.rand(2, 1, 17, 17), torch.rand(3, 1, 17, 17)
    traced = torch.jit.trace(lambda x: network(x).scores, images)
    assert not [node for node in traced.inlined_graph.nodes() if node.kind().startswith("torchcaps")]
    torch.testing.assert_close(traced(others), network(others).scores, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rule", ["attention", "self_routing", "generative"])
def test_linearized_rules_have_the_tangents_of_forward_mode(rule):
    """An assignment to a part of a new tensor would give wrong tangents in torch.func.linearize of PyTorch 2.13."""
    one, (pose, activation) = layer(rule).double().eval(), children()
    pose, activation = pose.double(), activation.double()
    for parameter in one.routing.parameters():
        nn.init.normal_(parameter)

    def parents(pose):
        return one(Capsules(pose, activation)).activation

    tangent = torch.randn_like(pose)
    _, right = torch.func.jvp(parents, (pose,), (tangent,))
    _, linear = torch.func.linearize(parents, pose)
    assert right.abs().max() > 0
    torch.testing.assert_close(linear(tangent), right)


class Misspelt(Rule):
    def routes(self, votes):
        return Capsules(votes.moments().mean, votes.moments().mass)


class WithoutReturn(Rule):
    def route(self, votes):
        votes.moments()


class ReturningTuple(Rule):
    def route(self, votes):
        found = votes.moments()
        return found.mean, found.mass


class WithoutActivation(Rule):
    def route(self, votes):
        return Capsules(votes.moments().mean, None)


class WithoutRows(Rule):
    def route(self, votes):
        found = votes.moments()
        return Capsules(found.mean[:, :, :, 0], found.mass)


class ReturningManyActivations(Rule):
    def route(self, votes):
        found = votes.moments()
        return Capsules(found.mean, found.mean.square())


@pytest.mark.parametrize(
    ("rule", "error", "message"),
    [
        (Misspelt, NotImplementedError, r"Misspelt has no method route: define route\(self, votes\)"),
        (WithoutReturn, TypeError, r"WithoutReturn.route must return Capsules\(.*; got NoneType None"),
        (ReturningTuple, TypeError, r"got a float32 tensor \[2, 1, 3, 1, 5\], a float32 tensor \[2, 1, 3\]"),
        (WithoutActivation, TypeError, r"got a float32 tensor \[2, 1, 3, 1, 5\], NoneType None"),
        (WithoutRows, TypeError, r"got a float32 tensor \[2, 1, 3, 5\], a float32 tensor \[2, 1, 3\]"),
        (ReturningManyActivations, TypeError, r"activation \[B, P, J\]; got .*, a float32 tensor \[2, 1, 3, 1, 5\]"),
    ],
)
def test_mistakes_in_the_method_route_are_named(rule, error, message):
    with pytest.raises(error, match=message):
        layer(rule())(children())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_attention_routing_in_another_dtype_can_be_traced(dtype):
    rule, routing_map = AttentionRouting(5).to(dtype).requires_grad_(False), RoutingMap.dense(6)
    transform, (pose, activation), others = torch.randn(6, 4, 3, 8, 5), children(), children(3)
    traced = torch.jit.trace(lambda pose: rule(Capsules(pose, activation[:1]), transform, routing_map).pose, pose)
    torch.testing.assert_close(traced(others.pose), rule(others, transform, routing_map).pose)


@pytest.mark.parametrize("rule", [rule for rule in ROUTINGS if hasattr(layer(rule).routing, "iterations")])
@pytest.mark.parametrize("iterations", [0, 1.5])
def test_a_wrong_number_of_iterations_that_is_set_later_is_refused(rule, iterations):
    one = layer(rule)
    one.routing.iterations = iterations
    with pytest.raises(ValueError, match=rf"(iterations|passes) must be an integer .*; got {iterations}"):
        one(children())


def test_activations_of_self_routing_never_exceed_one():
    """With one parent type, all activations are 1; without a bound, rounding gives values above 1."""
    torch.manual_seed(0)
    shape = (7, 5, 1, 8, 5)
    one = CapsuleLayer(RoutingMap.dense(7), torch.randn(shape), SelfRouting(*shape[:3], (1, 8)))
    activation = one(Capsules(torch.randn(200, 7, 5, 1, 8), torch.rand(200, 7, 5))).activation
    assert activation.max() == 1
    torch.testing.assert_close(activation, torch.ones_like(activation))


def test_check_rule_refuses_a_rule_that_keeps_a_tensor_with_gradients():
    class Keeping(UniformRouting):
        def route(self, votes):
            self.last = super().route(votes)
            return self.last

    with pytest.raises(AssertionError, match=r"After a call, the rule can be copied .* detach them first"):
        check_rule(lambda _: Keeping())


def test_check_rule_refuses_a_rule_that_divides_by_the_sum_of_inactive_children():
    class Dividing(UniformRouting):
        weighs_activations = True

        def route(self, votes):
            pose, _ = super().route(votes)
            total = votes.activation_sums()[:, :, None]
            return Capsules(pose, votes.moments(variance=False).mass / total)

    with pytest.raises(AssertionError, match="finite if one child or no child is active"):
        check_rule(lambda _: Dividing())


def test_check_rule_refuses_negative_activations():
    class Logits(UniformRouting):
        def route(self, votes):
            pose, activation = super().route(votes)
            return Capsules(pose, activation.log())

    with pytest.raises(AssertionError, match=r"activations are at least 0. \(an activation is -.*such as sigmoid"):
        check_rule(lambda _: Logits())


def test_check_rule_refuses_a_rule_that_is_wrong_in_training_only():
    class Dropping(UniformRouting):
        def route(self, votes):
            pose, activation = super().route(votes)
            return Capsules(pose / (0 if self.training else 1), activation)

    with pytest.raises(AssertionError, match=r"In training mode, values and gradients are finite"):
        check_rule(lambda _: Dropping())


def test_saved_options_without_property_are_refused_in_one_line(tmp_path, monkeypatch):
    class Forgetful(UniformRouting):
        def saved_options(self):
            return {}

    monkeypatch.setitem(ROUTINGS, "forgetful", Forgetful)
    with pytest.raises(BadInput, match="forgetful has an option that cannot be saved"):
        CapsNet((1, 17, 17), 5, routing="forgetful").save_pretrained(tmp_path)


def test_losses_name_the_argument_that_is_wrong():
    target = torch.tensor([0, 1])
    with pytest.raises(ValueError, match=r"scores must be a tensor \[B, classes\].*pass prediction.scores"):
        activation_cross_entropy(torch.rand(2, 1, 3), target)
    for label_smoothing in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match=r"label_smoothing must be in \[0, 1\]; got"):
            cross_entropy(torch.rand(2, 3), target, label_smoothing)


class Nearest(Rule):
    """The example of docs/write-your-own-rule.md for rules that no `Agreement` can express."""

    competition = "types"

    def route(self, votes):
        all_votes = votes.materialised()
        shortest = all_votes.square().sum(dim=(4, 5)).argmin(dim=1, keepdim=True)
        couplings = torch.zeros(all_votes.shape[:4]).scatter(1, shortest, 1.0).to(all_votes)
        weights = couplings * votes.weights() * all_votes.shape[1]
        mass = votes.routing_map.sum_at_parents(weights.sum(dim=3))
        total = votes.routing_map.sum_at_parents(torch.einsum("bjec,bjecrn->bjern", weights, all_votes))
        pose = total / (mass[..., None, None] + 1e-6)
        return Capsules(pose.transpose(1, 2), mass.transpose(1, 2).tanh())


def test_the_couplings_of_a_rule_that_never_calls_moments_are_unknown():
    one = layer(Nearest())
    assert one(children()).pose.shape == (2, 1, 3, 1, 5)
    with pytest.raises(ValueError, match=r"the rule does not call votes.moments: leave out"):
        one(children(), return_couplings=True)


def test_the_class_of_a_rule_can_include_none_of_the_above():
    class Leaky(UniformRouting):
        none_of_the_above = True

    for rule, total in ((UniformRouting(), 1), (Leaky(), 0.75)):
        couplings = layer(rule)(children(), return_couplings=True)[1]
        torch.testing.assert_close(couplings.sum(dim=1), torch.full((2, 6, 4), float(total)))


class Sharpened(UniformRouting):
    def __init__(self, sharpness: float = 1.0, schedule: Sequence[Sequence[float]] = ()):
        super().__init__()
        self.sharpness, self.schedule = sharpness, schedule
        self.temperatures = torch.linspace(0.5, sharpness, 3).tolist()

    @property
    def saved_options(self):
        return {"schedule": self.schedule}


def test_a_rule_whose_saved_options_lack_an_argument_is_not_saved(tmp_path, monkeypatch):
    monkeypatch.setitem(ROUTINGS, "sharpened", Sharpened)
    small = {"image_shape": (1, 17, 17), "num_classes": 5, "convolution_channels": 4, "primary_types": 2}
    CapsNet(**small, routing=Routing("sharpened", schedule=((1, 0.5),))).save_pretrained(tmp_path / "default")
    with pytest.raises(BadInput, match=r"sharpness is 2.0 here, but would be 1.0\): return sharpness in saved_options"):
        CapsNet(**small, routing=Routing("sharpened", sharpness=2.0)).save_pretrained(tmp_path / "sharp")


def test_a_constructor_that_computes_with_tensors_can_be_saved_and_loaded(tmp_path, monkeypatch):
    monkeypatch.setitem(ROUTINGS, "sharpened", Sharpened)
    ResidualCapsNet((3, 16, 16), 3, (4, 8), routing="sharpened").save_pretrained(tmp_path)
    loaded = ResidualCapsNet.from_pretrained(tmp_path, routing=Routing("sharpened", sharpness=2.0))
    assert loaded.head.class_capsules.routing.temperatures == [0.5, 1.25, 2.0]


def test_wrong_entries_of_routings_and_missing_sizes_are_named(monkeypatch):
    class Sized(Rule):
        def __init__(self, parent_types):
            super().__init__()

    monkeypatch.setitem(ROUTINGS, "sized", Sized)
    with pytest.raises(BadInput, match=r"Sized needs parent_types: give it the class method for_layer"):
        layer("sized")
    for wrong in (UniformRouting(), nn.Linear):
        monkeypatch.setitem(ROUTINGS, "wrong", wrong)
        with pytest.raises(BadInput, match=r"ROUTINGS\['wrong'\] must be a class derived from torchcaps.Rule"):
            layer("wrong")


class PartlyConstant(Rule):
    def route(self, votes):
        fixed = votes.detach().moments(variance=False).mean
        found = votes.moments(Agreement(linear=fixed), variance=False)
        return Capsules(found.mean, found.mass.tanh())


@pytest.fixture
def without_compilation(monkeypatch):
    """Leave out the last test of check_rule: Dynamo cannot trace the run-time type checks of these tests."""
    monkeypatch.setattr(testing, "_compiled", lambda *_: None)


@pytest.mark.usefixtures("without_compilation")
def test_check_rule_can_leave_out_finite_differences():
    for rule in (PartlyConstant(), DynamicRouting(gradient_passes="last")):
        check_rule(lambda _, rule=rule: rule, finite_differences=False)
        with pytest.raises(AssertionError, match="Gradients match finite differences"):
            check_rule(lambda _, rule=rule: rule)


def test_check_rule_needs_a_function():
    for wrong in (UniformRouting, UniformRouting()):
        with pytest.raises(
            TypeError, match=r"make must be a function .*lambda layer: MyRule\(\); got .*UniformRouting"
        ):
            check_rule(wrong)


@pytest.mark.usefixtures("without_compilation")
def test_check_rule_accepts_a_rule_without_moments_and_refuses_swapped_dimensions():
    check_rule(lambda _: Nearest())

    class Swapped(UniformRouting):
        def route(self, votes):
            pose, activation = super().route(votes)
            sites, types = activation.shape[1:]
            return Capsules(pose, activation.reshape(-1, types, sites).transpose(1, 2))

    with pytest.raises(AssertionError, match=r"conv map: The order of parent sites changes only the order"):
        check_rule(lambda _: Swapped())
