"""The decoder: GPT-2's size, no look ahead, exact private steps, a loss of one number a record."""

from __future__ import annotations

import pytest
import torch
from model_checks import assert_exact

from tacit.models import gpt, next_token_loss

VOCABULARY = 11


def small(tied=True, layers=2):
    torch.manual_seed(0)
    return gpt(VOCABULARY, layers, width=12, heads=3, context=7, tied=tied).double()


def tokens(records=3, length=7):
    return torch.randint(0, VOCABULARY, (records, length))


def test_gpt_2_small_has_its_published_size():
    with torch.device("meta"):
        model = gpt(50257, context=1024)
    assert sum(p.numel() for p in model.parameters()) == 124_439_808


def test_tied_by_default():
    model = small()
    assert model.head.weight is model.tokens.weight
    apart = small(tied=False)
    assert apart.head.weight is not apart.tokens.weight


def test_no_position_sees_what_comes_after_it():
    model, text = small(), tokens()
    changed = text.clone()
    changed[:, 4] = (changed[:, 4] + 1) % VOCABULARY
    before, after = model(text), model(changed)
    assert before.shape == (3, 7, VOCABULARY)
    torch.testing.assert_close(before[:, :4], after[:, :4], rtol=0, atol=1e-14)
    assert (before[:, 4:] != after[:, 4:]).any(dim=(0, 2)).all()


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("length", [7, 4])
def test_one_private_step_is_that_of_records_alone(tied, length):
    text = tokens(length=length)
    assert_exact(small(tied), text, text, next_token_loss)


def test_the_loss_is_each_records_mean_over_its_next_tokens():
    outputs, text = torch.randn(3, 7, VOCABULARY, dtype=torch.float64), tokens()
    found = next_token_loss(outputs, text)
    for row, logits, words in zip(found, outputs.log_softmax(dim=2), text, strict=True):
        expected = -sum(logits[t, words[t + 1]] for t in range(6)) / 6
        torch.testing.assert_close(row, expected)


def test_branches_start_small_in_a_deep_model():
    shallow, deep = (float(small(layers=n).blocks[0].narrow.weight.data.std()) for n in (2, 18))
    assert shallow / deep == pytest.approx(3.0, rel=0.2)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: small()(tokens(length=8)), "7 positions"),
        (lambda: gpt(VOCABULARY, width=10, heads=3), "multiple of 3 heads"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(call, says):
    with pytest.raises(ValueError, match=says):
        call()
