"""The mean over one record's own tokens."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiny_transformers import tiny_gpt2

import tacit
from tacit.losses import Task, TokenCrossEntropy, loss_named, losses_of

B, T, V = 5, 7, 11


def tokens():
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(B, T, V, generator=generator, dtype=torch.float64)
    y = torch.randint(V, (B, T), generator=generator)
    y[1, 3:] = -100
    y[2, 0] = -100
    y[3] = -100
    return h, y


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("shift", [False, True])
def test_each_record_is_its_own_cross_entropy(shift, smoothing):
    h, y = tokens()
    loss = TokenCrossEntropy(shift=shift, label_smoothing=smoothing)
    h.requires_grad_()
    found = losses_of(loss, h, y)
    for i in range(B):
        one, target = (h[i, :-1], y[i, 1:]) if shift else (h[i], y[i])
        expected = F.cross_entropy(one, target, label_smoothing=smoothing)
        torch.testing.assert_close(found[i], torch.nan_to_num(expected))  # 0 of no token
    (gradient,) = torch.autograd.grad(found.sum(), h)
    assert gradient.isfinite().all()
    assert gradient[3].abs().max() == 0
    assert loss(h, y).item() == pytest.approx(found.mean().item())


def test_another_token_to_ignore():
    h, y = tokens()
    padded = torch.where(y == -100, 0, y)
    found = TokenCrossEntropy(ignore_index=0).per_record(h, padded)
    expected = [F.cross_entropy(h[i], padded[i], ignore_index=0) for i in range(B)]
    torch.testing.assert_close(found, torch.nan_to_num(torch.stack(expected)))


def test_the_shifted_loss_is_that_of_transformers():
    model = tiny_gpt2(V, T)
    _, y = tokens()
    ids = y.clamp_min(0)
    with torch.no_grad():
        found = losses_of(TokenCrossEntropy(shift=True), model(input_ids=ids), y)
        for i in (0, 1, 2, 4):
            theirs = model(input_ids=ids[i : i + 1], labels=y[i : i + 1]).loss
            torch.testing.assert_close(found[i], theirs)


@pytest.mark.parametrize("shift", [False, True])
def test_a_long_record_leaves_the_others_alone(shift):
    h, y = tokens()
    loss = TokenCrossEntropy(shift=shift)
    before = loss.per_record(h, y)
    y[0, 1:] = -100
    torch.testing.assert_close(loss.per_record(h, y)[1:], before[1:], rtol=0, atol=0)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_constant_holds_and_is_reached_by_one_token(smoothing):
    loss = TokenCrossEntropy(label_smoothing=smoothing)
    found = tacit.losses.check_loss(loss, 40, steps=20)
    assert found.task is Task.TOKENS
    assert found.share < 1
    one = torch.tensor([[0, -100, -100]])
    share = tacit.losses.attack_constant(Flat(loss), 3 * 40, targets=one, steps=60)
    assert 0.98 < share <= 1 + 1e-9


class Flat:
    def __init__(self, loss):
        self.loss = loss

    def lipschitz_for(self, num_outputs):
        return self.loss.lipschitz_for(num_outputs)

    def __call__(self, outputs, targets):
        return self.loss(outputs.unflatten(1, (3, -1)), targets)


def test_shapes_and_numbers_that_do_not_fit_are_named():
    h, y = tokens()
    with pytest.raises(ValueError, match=r"\(records, tokens, vocabulary\)"):
        TokenCrossEntropy().per_record(h.transpose(1, 2), y)
    with pytest.raises(ValueError, match="label_smoothing is 2"):
        TokenCrossEntropy(label_smoothing=2.0)
    assert loss_named("token-cross-entropy", shift=True) == TokenCrossEntropy(shift=True)
