"""Keys come from the operating system or a seed; a fork or a copy never repeats a secret one."""

from __future__ import annotations

import copy
import os
import pickle

import numpy as np
import pytest
import torch
from forked import Forked

from tacit.randomness import Randomness

CPU = torch.device("cpu")
COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda source: pickle.loads(pickle.dumps(source)),
}


def one_draw(source: Randomness) -> list[float]:
    return source.stream("noise", 0).normals([6], CPU)[0].tolist()


def test_no_seed_never_the_same_even_if_torch_is_seeded():
    torch.manual_seed(0)
    one = one_draw(Randomness())
    torch.manual_seed(0)
    assert one != one_draw(Randomness())


def test_one_seed_one_stream():
    assert one_draw(Randomness(5)) == one_draw(Randomness(5)) != one_draw(Randomness(6))
    assert one_draw(Randomness(5)) != one_draw(Randomness(-5))
    assert one_draw(Randomness(2**70)) != one_draw(Randomness(2**70 + 1))


def test_drawing_does_not_disturb_pytorchs_generator():
    torch.manual_seed(0)
    expected = torch.randn(3)
    torch.manual_seed(0)
    one_draw(Randomness())
    assert torch.equal(torch.randn(3), expected)


def test_a_forked_child_does_not_repeat_its_parents_draws():
    source = Randomness()
    children = [Forked(lambda: one_draw(source)).result() for _ in range(2)]
    assert [how for how, _ in children] == ["done", "done"]
    assert len({repr(one_draw(source)), *(repr(drawn) for _, drawn in children)}) == 3


def test_the_fork_test_sees_a_generator_that_repeats_itself():
    generator = torch.Generator().manual_seed(0)
    in_child = Forked(lambda: torch.randn(6, generator=generator).tolist()).result()
    assert in_child == ("done", torch.randn(6, generator=generator).tolist())


@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_does_not_repeat_the_originals_draws(copied):
    source = Randomness()
    assert one_draw(COPIES[copied](source)) != one_draw(source)


def test_fingerprints_name_seeded_streams_and_tell_nothing():
    assert Randomness().fingerprint("sampling", 1) is None
    one = Randomness(3).fingerprint("sampling", 1)
    assert one == Randomness(3).fingerprint("sampling", 1)
    assert one != Randomness(3).fingerprint("sampling", 2)
    assert one != Randomness(4).fingerprint("sampling", 1)
    assert "secret" in repr(Randomness(3).stream("noise"))


@pytest.mark.parametrize("seed", [True, 1.0, 1.9, "1"])
def test_a_seed_is_a_whole_number(seed):
    with pytest.raises(TypeError):
        Randomness(seed)


def test_numpys_whole_numbers_are_the_same_seed():
    assert one_draw(Randomness(np.int64(5))) == one_draw(Randomness(5))


def test_a_fork_is_noticed_whatever_its_process_number(monkeypatch):
    """In a namespace of its own a child may have its parent's number."""
    source = Randomness()
    monkeypatch.setattr(os, "getpid", lambda: 1)
    how, in_child = Forked(lambda: one_draw(source)).result()
    assert how == "done"
    assert in_child != one_draw(source)
