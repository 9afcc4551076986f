"""The attack breaks general-purpose generators, and does not break Tacit's stream."""

from __future__ import annotations

import random
import time
from functools import partial

import numpy as np
import pytest
import torch

from tacit import auditing
from tacit.auditing.mersenne_twister import FORMATS, Inconsistent, predicted
from tacit.auditing.random_draws import _philox
from tacit.randomness import Randomness

FEW = range(1 << 12)
LARGE = (1 << 60) + 987654321  # no attack tries this one


def torch_draws(kind, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return lambda n: getattr(torch, kind)(n, dtype=dtype, generator=generator)


def python_draws(seed):
    source = random.Random(seed)
    return lambda n: np.array([source.gauss(0, 1) for _ in range(n)])


SOURCES = {
    "torch.randn in float64": lambda seed: torch_draws("randn", torch.float64, seed),
    "torch.randn in float32": lambda seed: torch_draws("randn", torch.float32, seed),
    "random.gauss": python_draws,
    "torch.rand in float64": lambda seed: torch_draws("rand", torch.float64, seed),
    "torch.rand in float32": lambda seed: torch_draws("rand", torch.float32, seed),
    "random.random, RandomState.random_sample": random.Random,
}


@pytest.mark.parametrize("name", ["torch.randn in float32", "torch.rand in float64"])
def test_a_mersenne_twister_is_predicted_whatever_its_seed(name):
    found = auditing.attack_draws(SOURCES[name](LARGE), seeds=FEW)
    assert name in str(found.faults)
    assert found.largest > 1.9


@pytest.mark.parametrize("name", ["random.gauss", "random.random, RandomState.random_sample"])
def test_its_other_formats(name):
    how = next(one for one in FORMATS if one.name == name)
    draws = np.array(auditing.random_draws._as_function(SOURCES[name](LARGE))(2624))
    guess = predicted(draws[:2560], how, 64)
    assert np.abs(guess - draws[2560:]).max() < how.tolerance


def test_numbers_of_another_kind_contradict_each_other():
    with pytest.raises(Inconsistent):
        predicted(np.random.default_rng(0).standard_normal(2560), FORMATS[0], 64)


@pytest.mark.parametrize("seed", [0, 1, 65535])
def test_a_small_seed_of_torch_is_found(seed):
    found = auditing.attack_draws(torch.Generator().manual_seed(seed))
    assert f"the seed is {seed} of torch.manual_seed" in str(found.faults)


def test_the_time_as_a_seed_is_found():
    seed = int(time.time()) - 3600
    found = auditing.attack_draws(torch.Generator().manual_seed(seed))
    assert f"the seed is {seed}" in str(found.faults)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (np.random.default_rng, "NumPy's default_rng"),
        (lambda s: np.random.Generator(np.random.Philox(s)), "NumPy's Philox"),
        (lambda s: np.random.Generator(np.random.Philox(key=s)), "NumPy's Philox, as a key"),
        (lambda s: np.random.RandomState(s).standard_normal, "NumPy's RandomState"),
        (np.random.RandomState, "NumPy's RandomState"),
        (random.Random, "Python's random"),
        (python_draws, "Python's random.gauss"),
    ],
)
def test_small_seeds_of_other_generators_are_found(make, name):
    found = auditing.attack_draws(make(321), seeds=range(512))
    assert f"the seed is 321 of {name}" in str(found.faults)


def test_philox_is_the_published_one():
    """The first known answer of Random123's `kat_vectors` for philox4x32-10."""
    words = _philox(np.array([0], dtype=np.uint64), 1)[0, 0]
    assert [f"{int(w):08x}" for w in words] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("seed", [0, 12345, 1_048_575])
def test_a_small_seed_of_a_gpu_is_found(seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    found = auditing.attack_draws(generator)
    assert f"the seed is {seed} of torch.cuda.manual_seed" in str(found.faults)


def uniforms(n):
    return Randomness().stream("any").words(n, np.uint64).astype(np.float64) * 2.0**-64


def test_ours_is_not_broken():
    """As uniform numbers; the noise of releases is attacked with the planted generators."""
    found = auditing.attack_draws(uniforms, seeds=FEW)
    assert found.holds
    assert found.largest == 0


def test_streams_that_repeat_each_other_are_seen():
    def stream(step):
        return Randomness(3).stream("noise", step)

    fresh = {f"step {i}": stream(i) for i in range(5)}
    assert auditing.check_repeats(fresh).holds
    found = auditing.check_repeats({**fresh, "after a fork": stream(2)})
    assert found.faults == ("after a fork repeats the draws of step 2",)
    generator = partial(torch.randn, 600, dtype=torch.float64)
    torch.manual_seed(0)
    one = generator()
    assert not auditing.check_repeats({"one": one, "shifted": one[77:]}).holds


def test_a_period_is_seen():
    block = torch.randn(500, dtype=torch.float64, generator=torch.Generator().manual_seed(LARGE))
    found = auditing.attack_draws(block.repeat(6), seeds=range(8))
    assert "occur again" in str(found.faults)


def test_too_few_draws_are_refused():
    with pytest.raises(ValueError, match="give at least 128"):
        auditing.attack_draws(torch.randn(50))
