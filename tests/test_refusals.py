"""Bad arguments are refused on every backend; the error names the argument, what it got and the cure."""

from functools import partial

import pytest
import torch
from torch import nn

from torchcaps import (
    AttentionCapsNet,
    BaselineCNN,
    CapsNet,
    CapsuleLayer,
    Capsules,
    ClassCaps,
    ConvCaps,
    Decoder,
    DenseCaps,
    DynamicRouting,
    EfficientCapsNet,
    EMRouting,
    GenerativeCapsNet,
    MatrixBaselineCNN,
    MatrixCapsNet,
    PooledCNN,
    PoseNorm,
    PrimaryCaps,
    ResidualCapsNet,
    RoutingMap,
    SelfRouting,
    SelfRoutingCapsNet,
    SharedCaps,
    coordinate_addition,
    dynamic_routing,
    em_routing,
    margin_loss,
    spread_loss,
)
from torchcaps.kernels import _cpu
from torchcaps.routing import ROUTINGS, LayerShape
from torchcaps.routing.votes import Agreement, Votes

pytestmark = pytest.mark.usefixtures("untyped")
BACKENDS = ["reference", "auto", *(["fused"] if _cpu is not None else [])]


def right():
    return {
        "pose": torch.randn(2, 4, 3, 2, 2),
        "activation": torch.rand(2, 4, 3),
        "transform": torch.randn(4, 3, 5, 2, 2),
        "beta_u": torch.zeros(5),
        "beta_a": torch.zeros(5),
    }


def em(backend, options, **tensors):
    tensors = {**right(), **tensors}
    children = tensors.get("children", Capsules(tensors["pose"], tensors["activation"]))
    rest = (tensors[name] for name in ("transform", "beta_u", "beta_a"))
    transform, *betas = rest
    return em_routing(children, transform, RoutingMap.dense(4), *betas, backend=backend, **options)


def dynamic(backend, options, **tensors):
    tensors = {**right(), **tensors}
    return dynamic_routing(tensors["pose"], tensors["transform"], RoutingMap.dense(4), backend=backend, **options)


EITHER = [
    (
        {"pose": torch.ones(2, 4, 3, 2, 2, dtype=torch.int64)},
        r"pose must have a floating-point dtype.*int64 tensor.*pose\.float\(\)",
    ),
    ({"transform": torch.ones(4, 3, 5, 2, 2).int()}, r"transform must have a floating-point dtype; got an int32"),
    ({"transform": torch.ones(4, 3, 5, 2, 2, device="meta")}, r"transform is on meta and pose on cpu: move"),
    ({"transform": torch.ones(4, 3, 0, 2, 2)}, r"every dimension of transform .* at least 1; got \[4, 3, 0, 2, 2\]"),
    ({"pose": torch.ones(2, 4, 0, 2, 2), "activation": torch.ones(2, 4, 0)}, r"every dimension of pose"),
    ({"pose": torch.ones(2, 4, 3, 2)}, r"pose must be \[B, S, C, R, Q\]"),
    ({"transform": [1.0]}, r"transform must be a tensor .* got list"),
]
EM_ALONE = [
    ({"activation": torch.rand(2, 4, 1)}, r"activation must be \[B, S, C\] = \[2, 4, 3\].*float32 tensor \[2, 4, 1\]"),
    ({"activation": torch.ones(2, 4, 3).int()}, r"activation must have a floating-point dtype; got an int32"),
    ({"activation": torch.ones(2, 4, 3, device="meta")}, r"activation is on meta and pose on cpu"),
    ({"beta_u": torch.zeros(8)}, r"beta_u must be \[5\].*got a float32 tensor \[8\].*EMRouting\(5\)"),
    ({"beta_a": torch.zeros(1)}, r"beta_a must be \[5\].*got a float32 tensor \[1\]"),
    ({"activation": None}, r"activation must be \[B, S, C\] = \[2, 4, 3\] to fit pose; got NoneType"),
    ({"children": torch.ones(2, 4, 3, 2, 2)}, r"children must be Capsules\(pose, activation\); got a float32 tensor"),
]
ITERATIONS = [0, -1, 1001, 10**9, True, 3.0, "3", None]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("rule", "change", "message"), [(rule, *one) for rule in (em, dynamic) for one in EITHER])
def test_tensors_that_no_rule_accepts_are_refused(rule, change, message, backend):
    with pytest.raises(ValueError, match=message):
        rule(backend, {}, **change)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("change", "message"), EM_ALONE)
def test_tensors_that_em_routing_does_not_accept_are_refused(change, message, backend):
    with pytest.raises(ValueError, match=message):
        em(backend, {}, **change)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["em", "generative", "self_routing", "variational_bayes"])
def test_an_activation_that_does_not_fit_the_pose_is_refused_by_every_rule_that_weighs_it(name, backend):
    rule = rule_of(name, backend)
    for activation, message in (
        (right()["activation"][:, :, :1], r"activation must be \[B, S, C\] = \[2, 4, 3\] to fit pose"),
        (None, r"activation must be \[B, S, C\] = \[2, 4, 3\] to fit pose; got NoneType"),
        (torch.ones(2, 4, 3).int(), "activation must have a floating-point dtype; got an int32"),
        (1.5 - torch.arange(24.0).view(2, 4, 3), "activation must be at least 0; the smallest value is -21.5: convert"),
        (torch.ones(2, 4, 3, dtype=torch.complex64), "activation must have a floating-point dtype; got a complex64"),
    ):
        with pytest.raises(ValueError, match=message):
            rule(Capsules(right()["pose"], activation), right()["transform"], RoutingMap.dense(4))
    rule(Capsules(right()["pose"], torch.full((2, 4, 3), -1e-7)), right()["transform"], RoutingMap.dense(4))


def rule_of(name, backend):
    rule = ROUTINGS[name].for_layer(LayerShape(4, 3, 5, (2, 2), (2, 2)))
    rule.backend = backend
    return rule


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize(("change", "message"), EITHER)
def test_tensors_that_no_rule_accepts_are_refused_by_every_rule(name, change, message):
    tensors = {**right(), **change}
    with pytest.raises(ValueError, match=message):
        rule_of(name, "auto")(
            Capsules(tensors["pose"], tensors["activation"]), tensors["transform"], RoutingMap.dense(4)
        )


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("routing_map", [None, "dense", 5])
def test_a_map_that_is_no_routing_map_is_refused_by_every_rule(name, routing_map):
    children = Capsules(right()["pose"], right()["activation"])
    with pytest.raises(ValueError, match=r"routing_map must be a RoutingMap, such as RoutingMap\.dense\(6\); got"):
        rule_of(name, "auto")(children, right()["transform"], routing_map)


@pytest.mark.parametrize("name", ["generative", "self_attention", "self_routing"])
def test_a_transform_of_other_sizes_than_the_rule_is_refused(name):
    rule = ROUTINGS[name].for_layer(LayerShape(4, 1, 5, (2, 2), (2, 2)))
    children = Capsules(right()["pose"], right()["activation"])
    with pytest.raises(ValueError, match=r"must have \[K, C, J\] = \[4, 1, 5\].* got \[4, 3, 5\]: .* child_types=3"):
        rule(children, right()["transform"], RoutingMap.dense(4))


@pytest.mark.parametrize("name", ROUTINGS)
def test_a_pose_instead_of_capsules_is_refused_by_every_rule(name):
    with pytest.raises(ValueError, match=r"children must be Capsules\(pose, activation\); got a float32 tensor"):
        rule_of(name, "auto")(right()["pose"], right()["transform"], RoutingMap.dense(4))


@pytest.mark.parametrize("size", [1, 3, 8])
def test_coordinates_are_not_added_to_vectors_whose_size_is_no_square(size):
    message = rf"needs a pose size of 4, 9, 16, … \(a square\); got {size}: change"
    with pytest.raises(ValueError, match=message):
        ClassCaps(torch.rand(4, 2), 2, 3, (1, size))
    with pytest.raises(ValueError, match=message):
        coordinate_addition(torch.rand(2, 4, 2, 1, size), torch.rand(1, 2, 3, size, size), torch.rand(4, 2))


def test_a_rule_with_no_iterations_still_has_one_pass():
    rule = ROUTINGS["uniform"]()
    rule.iterations = 0
    assert rule.passes == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_wrong_agreements_floors_and_passes_are_refused(backend):
    children = right()["pose"], right()["activation"], right()["transform"], RoutingMap.dense(4)
    votes = Votes(*children, backend=backend)
    for agreement, message in (
        (votes.moments(), "agreement must be an Agreement, a Recomputed or None; got"),
        (Agreement(linear=0.5), r"'linear' in the agreement must have shape .* got 0.5"),
        (Agreement(constant=torch.ones(2, 1, 5).int()), "agreement.constant must have a floating-point dtype"),
        (Agreement(constant=torch.ones(2, 1, 5, device="meta")), "agreement.constant is on meta and pose on cpu"),
    ):
        with pytest.raises(ValueError, match=message):
            votes.moments(agreement)
        with pytest.raises(ValueError, match=message):
            votes.couplings(agreement)
    for floor in (-1, None, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="floor must be a finite number of at least 0"):
            votes.gaussians(floor=floor)
    for passes in (0, -1, 1.5, None):
        with pytest.raises(ValueError, match="passes must be an integer of at least 1"):
            Votes(*children, passes=passes, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", [em, dynamic])
@pytest.mark.parametrize("iterations", ITERATIONS)
def test_iterations_out_of_range_are_refused(rule, iterations, backend):
    with pytest.raises(ValueError, match=r"iterations must be an integer from 1 to 1,000; got "):
        rule(backend, {"iterations": iterations})
    with pytest.raises(ValueError, match="iterations must be"):
        EMRouting(4, iterations=iterations)
    with pytest.raises(ValueError, match="iterations must be"):
        DynamicRouting(iterations=iterations)


@pytest.mark.parametrize("backend", BACKENDS)
def test_capsules_instead_of_a_pose_and_the_reverse_are_refused(backend):
    children = Capsules(right()["pose"], right()["activation"])
    with pytest.raises(ValueError, match=r"pose must be a tensor .*: pass children\.pose"):
        dynamic(backend, {}, pose=children)
    for rule in (DynamicRouting(backend=backend), EMRouting(5, backend=backend)):
        layer = CapsuleLayer(RoutingMap.dense(4), right()["transform"], rule)
        assert layer(children).activation.shape == (2, 1, 5)
        with pytest.raises(ValueError, match=r"children must be Capsules\(pose, activation\); got a float32 tensor"):
            layer(children.pose)


@pytest.mark.parametrize("rule", ["fast", dynamic_routing, EMRouting, nn.Identity()])
def test_functions_classes_other_modules_and_unknown_names_are_refused_as_rules(rule):
    children = (
        lambda: DenseCaps(4, 2, 2, 3, 2, routing=rule),
        lambda: ConvCaps((2, 2), 2, 3, 1, routing=rule),
        lambda: ClassCaps(torch.rand(4, 2), 2, 3, routing=rule),
        lambda: SharedCaps(2, 3, 2, routing=rule),
    )
    for make in children:
        with pytest.raises(ValueError, match=r"routing must be a Rule, such as|unknown routing"):
            make()


def test_a_rule_for_another_number_of_parent_types_is_refused():
    for make in (
        lambda: ConvCaps((2, 2), 2, 16, 1, routing=EMRouting(8)),
        lambda: SharedCaps(2, 16, 2, routing=EMRouting(8)),
    ):
        with pytest.raises(ValueError, match="made for parent_types=8, but the layer has parent_types=16: make"):
            make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: ConvCaps((2, 2), 2, 3, 1, pose_size=16),
            r"pose_size must be a tuple \(rows, columns\) .*; got 16",
        ),
        (lambda: ClassCaps(torch.rand(4), 2, 3), r"coordinates must be \[S, 2\].*got a float32 tensor \[4\]"),
        (lambda: ClassCaps(torch.rand(4, 2, device="meta"), 2, 3), r'coordinates .*meta device.*device="cpu"'),
        (lambda: ClassCaps(6, 2, 3), r"coordinates must be \[S, 2\].*got 6"),
        (
            lambda: ConvCaps(6, 2, 3, 1),
            r"child_grid must be a tuple \(height, width\) of integers of at least 1; got 6",
        ),
        (lambda: Decoder(3, 4, 28), r"image_shape must be a tuple \(channels, height, width\) .*; got 28"),
        (lambda: decoded(torch.rand(2, 1, 1, 1, 4)), r"\[B, 1, 3, R, N\] with R·N = 4; got .* \[2, 1, 1, 1, 4\]"),
        (lambda: decoded(torch.rand(2, 2, 3, 1, 2)), r"\[B, 1, 3, R, N\] with R·N = 4; got .* \[2, 2, 3, 1, 2\]"),
        (lambda: decoded(torch.rand(2, 1, 3, 4)), r"\[B, 1, 3, R, N\] with R·N = 4; got .* \[2, 1, 3, 4\]"),
        (
            lambda: CapsuleLayer(RoutingMap.dense(4), torch.rand(4, 3, 5, 2), "em"),
            r"transform must be a floating-point tensor \[K, C, J, Q, N\].* map, 4; got a float32 tensor \[4, 3, 5, 2",
        ),
        (
            lambda: CapsuleLayer(RoutingMap.dense(4), torch.rand(3, 3, 5, 2, 2), "em"),
            r"number of transforms of the routing map, 4; got a float32 tensor \[3, 3, 5, 2, 2\]",
        ),
        (
            lambda: CapsuleLayer(RoutingMap.dense(4), [[1.0]], "em"),
            r"transform must be a floating-point tensor \[K, C, J, Q, N\].*; got list",
        ),
        (lambda: ConvCaps((2, 2), 2, 3, 1, initial_std=-1.0), "initial_std must be .* at least 0; got -1.0"),
        (lambda: MatrixCapsNet(primary_initial_std=-1.0), "primary_initial_std must be .* at least 0; got -1.0"),
        (lambda: CapsNet(num_classes=0), "num_classes must be an integer of at least 1; got 0"),
        *(
            (partial(make, num_classes=count), f"num_classes must be an integer{said}")
            for make in (AttentionCapsNet, BaselineCNN, GenerativeCapsNet, MatrixBaselineCNN, PooledCNN)
            for count, said in ((0, " of at least 1; got 0"), ("10", "; got '10'"))
        ),
        (lambda: BaselineCNN(channels=()), r"channels must be a tuple of .*, one per layer; got tuple \(\)"),
        (lambda: BaselineCNN(hidden_sizes=(8, 0)), r"hidden_sizes must be a tuple of .*; got tuple \(8, 0\)"),
        (lambda: ResidualCapsNet(widths=()), r"widths must be a tuple of .*, one per layer; got tuple \(\)"),
        (lambda: EfficientCapsNet(channels=(32, 0, 64, 128)), r"channels must be a tuple of .*; got tuple \(32, 0, 64"),
        (lambda: SelfRoutingCapsNet(width=0), "width must be an integer of at least 1; got 0"),
        (lambda: SelfRoutingCapsNet(capsule_layers=1.5), "capsule_layers must be an integer; got 1.5"),
        (lambda: MatrixBaselineCNN(channels=8), "channels must be a list of integers; got 8"),
        (lambda: MatrixBaselineCNN((1, 4, 4), channels=(8, 8, 8)), "at least 8×8"),
        (
            lambda: Decoder(10, 16, (1, 28, 28), hidden_sizes=(0,)),
            r"hidden_sizes must be a tuple of .*; got tuple \(0,\)",
        ),
        (lambda: Decoder(10, 16, (1, 28, 28), hidden_sizes=512), "hidden_sizes must be a tuple of .*; got 512"),
        *(
            (lambda make=make: make(dropout=1.0), r"dropout must be in \[0, 1\); got 1.0")
            for make in (BaselineCNN, MatrixBaselineCNN)
        ),
        (lambda: RoutingMap.dense(-1), "child_sites must be an integer of at least 1; got -1"),
        (lambda: RoutingMap.shared(2.5), "child_sites must be an integer of at least 1; got 2.5"),
        (lambda: CapsNet(routing=DynamicRouting), "routing must be a Rule.*; got the class DynamicRouting"),
        (lambda: SelfRouting(6, 4, 10, 8), r"child_pose_shape must be a tuple \(rows, columns\) .*; got 8"),
        (lambda: DenseCaps(4, 0, 2, 3, 2), "child_types must be an integer of at least 1; got 0"),
        (
            lambda: ConvCaps((2, 2), 2, 0, 1, routing="dynamic"),
            "parent_types must be an integer of at least 1; got 0",
        ),
        (lambda: DenseCaps(4, 2, 2, 3, 0), "parent_pose_size must be an integer of at least 1; got 0"),
        (lambda: SharedCaps(2, 3, 0), "parent_pose_size must be an integer of at least 1; got 0"),
        (lambda: SharedCaps(2, 0, 2), "parent_types must be an integer of at least 1; got 0"),
        (lambda: EMRouting(0), "parent_types must be an integer of at least 1; got 0"),
        (lambda: PrimaryCaps(1, 2, 4, 3, "same"), "stride must be an integer of at least 1; got str 'same'"),
        (lambda: PrimaryCaps(1, 2, 4, 3, padding=-1), "padding must be an integer of at least 0; got -1"),
        (
            lambda: PrimaryCaps(1, 2, (4, 4, 1), 3),
            r"pose_size must be a tuple \(rows, columns\) .*; got tuple \(4, 4, 1\)",
        ),
        (lambda: PrimaryCaps(1, 2, 4, 3, activation="odd"), "activation must be one of length, sigmoid; got 'odd'"),
        (lambda: PrimaryCaps(1, 2, 4, 3, squash_form="odd"), "squash_form must be one of sabour, su, .*; got 'odd'"),
        (lambda: PrimaryCaps(1, 2, 4, 3, normalise="odd"), "normalise must be one of none, plain, affine; got 'odd'"),
        (lambda: EMRouting(3, backend="gpu"), "backend must be one of auto, reference, fused; got 'gpu'"),
        (lambda: DynamicRouting(backend="gpu"), "backend must be one of auto, reference, fused; got 'gpu'"),
    ],
)
def test_bad_options_of_layers_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def decoded(pose):
    return Decoder(3, 4, (1, 5, 5))(pose, torch.tensor([2, 2]))


def test_different_numbers_of_children_and_coordinates_are_refused():
    layer = ClassCaps(torch.rand(9, 2), 2, 3)
    with pytest.raises(ValueError, match=r"pose has 4 child sites \(dimension 1\), but the routing map has 9: "):
        layer(Capsules(torch.randn(2, 4, 2, 4, 4), torch.rand(2, 4, 2)))


@pytest.mark.parametrize("labels", [[0, 3], [-1, 2]])
def test_labels_out_of_range_are_refused(labels):
    labels = torch.tensor(labels)
    message = " must be from 0 to 2 for 3 classes; got "
    with pytest.raises(ValueError, match="labels" + message):
        Decoder(3, 4, (1, 2, 2))(torch.randn(2, 1, 3, 1, 4), labels)
    for loss in (margin_loss, spread_loss):
        with pytest.raises(ValueError, match="target" + message):
            loss(torch.rand(2, 3), labels)
        with pytest.raises(ValueError, match=r"target must be integers \[2\], one class index per sample"):
            loss(torch.rand(2, 3), torch.tensor([0, 1, 2]))
    with pytest.raises(ValueError, match="target must be integers"):
        margin_loss(torch.rand(2, 3), torch.tensor([0.0, 1.0]))


@pytest.mark.parametrize(
    ("loss", "options", "message"),
    [
        (margin_loss, {"positive_margin": 0.0}, r"positive_margin must be in \(0, 1\]; got 0.0"),
        (margin_loss, {"negative_margin": 1.0}, r"negative_margin must be in \[0, 1\); got 1.0"),
        (margin_loss, {"negative_weight": -0.5}, "negative_weight must be a finite number of at least 0; got -0.5"),
        (spread_loss, {"margin": -1.0}, r"margin must be in \(0, 1\]; got -1.0"),
    ],
)
def test_options_of_losses_out_of_range_are_refused(loss, options, message):
    with pytest.raises(ValueError, match=message):
        loss(torch.rand(2, 3), torch.tensor([0, 1]), **options)


def test_poses_of_another_size_are_refused():
    matrices = Capsules(torch.randn(2, 9, 4, 4, 4), torch.rand(2, 9, 4))
    with pytest.raises(ValueError, match=r"parents are 4×4, .* for poses of 4 elements: create AttentionRouting\(16\)"):
        SharedCaps(4, 3, 4, routing="attention")(matrices)
    for norm, created in ((PoseNorm(5, (4, 4)), "5 types and poses of 16"), (PoseNorm(8, 8), "8 types and poses of 8")):
        with pytest.raises(ValueError, match=f"4 types and poses of 4×4, .* for {created} elements: create PoseNorm"):
            norm(matrices)
    with pytest.raises(TypeError, match="routing_map must be a RoutingMap; got 6"):
        CapsuleLayer(6, torch.randn(6, 4, 10, 8, 16), "dynamic")
