import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchcaps import lengths, squash

FORMS = ["sabour", "su", "unit", "none"]


@pytest.mark.parametrize(("form", "constant"), [("sabour", 1.0), ("su", 0.5)])
@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=6))
def test_squash_equals_its_formula(form, constant, values):
    s = torch.tensor([values], dtype=torch.float64)
    length = s.norm()
    expected = length**2 / (constant + length**2) * s / length if length > 1e-100 else torch.zeros_like(s)
    torch.testing.assert_close(squash(s, form), expected)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-6, 1.0, 1e6, 1e15])
def test_squash_and_length_have_finite_values_and_gradients(form, dtype, scale):
    pose = (torch.tensor([[1.0, -2.0, 0.5]], dtype=dtype) * scale).requires_grad_()
    (squash(pose, form).sum() + lengths(pose)).backward()
    assert torch.isfinite(squash(pose, form)).all()
    assert torch.isfinite(pose.grad).all()


def test_squash_uses_the_norm_of_the_whole_pose_of_each_capsule():
    pose = torch.randn(2, 3, 4, 5)
    alone = torch.stack([torch.stack([squash(pose[b, c]) for c in range(3)]) for b in range(2)])
    torch.testing.assert_close(squash(pose), alone)
    assert (lengths(squash(pose)) < 1).all()


def test_gradients_of_squash_equal_finite_differences():
    pose = torch.randn(2, 1, 3, dtype=torch.float64, requires_grad=True)
    for form in FORMS:
        assert torch.autograd.gradcheck(lambda p, form=form: squash(p, form), pose)
        assert torch.autograd.gradgradcheck(lambda p, form=form: squash(p, form), pose)


@pytest.mark.usefixtures("untyped")
def test_an_unknown_form_of_squash_is_refused():
    with pytest.raises(ValueError, match="sabour, su, exponential, unit, none"):
        squash(torch.ones(1, 2), "relu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_makes_no_length_larger_than_1(dtype):
    pose = 30 * torch.randn(20_000, 1, 16, dtype=dtype)
    assert lengths(squash(pose, "exponential")).max() <= 1
