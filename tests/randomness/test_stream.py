"""The stream is ChaCha20, its numbers are Gaussian, and every address has draws of its own."""

from __future__ import annotations

import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch
from scipy import special, stats

from tacit.randomness import Randomness, Stream

CPU = torch.device("cpu")
RARE = 1e-7  # a fair draw fails a test this rarely

# RFC 8439, Appendix A.1: key, block counter, nonce, keystream; and Section 2.3.2.
VECTORS = [
    (
        "00" * 32,
        0,
        "00" * 12,
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586",
    ),
    (
        "00" * 32,
        1,
        "00" * 12,
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f",
    ),
    (
        "00" * 31 + "01",
        1,
        "00" * 12,
        "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"
        "8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0",
    ),
    (
        "00ff" + "00" * 30,
        2,
        "00" * 12,
        "72d54dfbf12ec44b362692df94137f328fea8da73990265ec1bbbea1ae9af0ca"
        "13b25aa26cb4a648cb9b9d1be65b2c0924a66c54d545ec1b7374f4872e99f096",
    ),
    (
        "00" * 32,
        0,
        "00" * 11 + "02",
        "c2c64d378cd536374ae204b9ef933fcd1a8b2288b3dfa49672ab765b54ee27c7"
        "8a970e0e955c14f3a88e741b97c286f75f8fc299e8148362fa198a39531bed6d",
    ),
    (
        "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f",
        1,
        "000000090000004a00000000",
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e",
    ),
]


def place_of(counter: int, nonce: str) -> tuple[int, int]:
    """The vectors' counter of 32 bits and nonce of 96 as a block and a parameter of 64 each."""
    words = counter.to_bytes(4, "little") + bytes.fromhex(nonce)
    return int.from_bytes(words[:8], "little"), int.from_bytes(words[8:], "little")


@pytest.mark.parametrize(("key", "counter", "nonce", "expected"), VECTORS)
def test_published_vectors(key, counter, nonce, expected):
    stream, (block, parameter) = Stream(bytes.fromhex(key)), place_of(counter, nonce)
    assert bytes(stream.keystream(64, parameter, block)).hex() == expected
    (words,) = stream.blocks(torch.tensor([block]), parameter).numpy().astype(np.uint32)
    assert words.tobytes().hex() == expected


def test_scattered_blocks_are_those_of_the_keystream():
    stream = Randomness(1).stream("blocks")
    offsets = torch.tensor([0, 7, 3, 2**32 - 1, 2**32, 2**45 + 1, 3])
    for parameter in (0, 5, 2**40):
        found = stream.blocks(offsets, parameter).numpy().astype(np.uint32)
        for row, offset in zip(found, offsets.tolist(), strict=True):
            assert row.tobytes() == bytes(stream.keystream(64, parameter, offset))


def test_a_draw_depends_on_its_address_alone():
    stream = Randomness(1).stream("noise", 4)
    alone = stream.normals([100_003], CPU, [3])[0]
    among = stream.normals([5, 20, 7, 100_003, 1], CPU)
    assert torch.equal(alone, among[3])
    assert torch.equal(stream.normals([17], CPU, [3])[0], alone[:17])
    assert torch.equal(Randomness(1).stream("noise", 4).normals([9], CPU, [3])[0], alone[:9])


def test_every_part_of_an_address_matters():
    drawn = set()
    for seed in (1, 2):
        for purpose in ("noise", "sampling"):
            for step in ((), (0,), (1,), (10,), (1, 0), ("1",), ("1", 0), ("10",)):
                for parameter in range(3):
                    stream = Randomness(seed).stream(purpose, *step)
                    drawn.add(float(stream.normals([1], CPU, [parameter])[0]))
    assert len(drawn) == 2 * 2 * 8 * 3


def test_gaussians_are_what_the_formula_says():
    """To a few roundings, and out to the last number of the tail."""
    stream = Randomness(5).stream("formula")
    drawn = stream.normals([4000], CPU)[0]
    words = np.frombuffer(stream.keystream(8 * 4000), dtype=np.uint64).reshape(-1, 2)
    bits = (words & np.uint64((1 << 53) - 1)).astype(object)
    with mpmath.workdps(40):
        for pair in range(0, 2000, 5):
            u = (mpmath.mpf(bits[pair, 0]) + 0.5) / 2**53
            angle = 2 * mpmath.pi * mpmath.mpf(bits[pair, 1]) / 2**53
            radius = mpmath.sqrt(-2 * mpmath.log(u))
            for half, value in enumerate((mpmath.cos(angle), mpmath.sin(angle))):
                got = float(drawn[2 * pair + half])
                allowed = 16 * radius * 2.0**-53 + 2.0**-52 / radius
                assert abs(got - radius * value) <= allowed
    assert math.sqrt(-2 * math.log(0.5 * 2.0**-53)) > 8.6


@pytest.fixture(scope="module")
def ten_million() -> np.ndarray:
    return Randomness().stream("battery").normals([10_000_000], CPU)[0].numpy()


def test_moments_of_ten_million(ten_million):
    count, powers = len(ten_million), np.ones_like(ten_million)
    for order in range(1, 9):
        powers *= ten_million
        expected = 0.0 if order % 2 else float(math.prod(range(order - 1, 0, -2)))
        second = float(math.prod(range(2 * order - 1, 0, -2)))
        error = math.sqrt((second - expected**2) / count)
        assert abs(powers.mean() - expected) < 5.5 * error


def test_kolmogorov_smirnov_on_ten_million(ten_million):
    count = len(ten_million)
    below = special.ndtr(np.sort(ten_million))
    steps = np.arange(count) / count
    distance = max((below - steps).max(), (steps + 1 / count - below).max())
    assert special.kolmogorov(distance * math.sqrt(count)) > RARE


def test_tails_of_ten_million(ten_million):
    for beyond in (2.0, 3.0, 4.0, 4.8):
        count = int((np.abs(ten_million) > beyond).sum())
        assert stats.binomtest(count, len(ten_million), 2 * stats.norm.sf(beyond)).pvalue > RARE


def test_no_correlation_within_a_stream(ten_million):
    limit = 5.5 / math.sqrt(len(ten_million))
    for lag in (1, 2, 3, 4, 7, 8, 16, 64, 32768):
        assert abs((ten_million[lag:] * ten_million[:-lag]).mean()) < limit
        squares = ten_million**2 - 1
        assert abs((squares[lag:] * squares[:-lag]).mean()) < 2 * limit


def test_addresses_are_independent():
    """All pairs of 24 neighbouring addresses: no correlation, of numbers or of squares."""
    source, size = Randomness(), 100_000
    rows = [
        source.stream(purpose, step).normals([size], CPU, [parameter])[0]
        for purpose in ("noise", "statistics")
        for step in range(4)
        for parameter in range(3)
    ]
    drawn = torch.stack(rows)
    for values in (drawn, (drawn**2 - 1) / math.sqrt(2)):
        correlations = values @ values.T / size - torch.eye(len(rows), dtype=torch.float64)
        off = correlations[~torch.eye(len(rows), dtype=torch.bool)]
        assert off.abs().max() < 6.5 / math.sqrt(size)


def test_words_are_uniform():
    words = Randomness().stream("words").words(1 << 20, np.uint8)
    assert stats.chisquare(np.bincount(words, minlength=256)).pvalue > RARE


@pytest.mark.parametrize("rate", [1.0, 0.5, 0.1, 1e-3, 3e-6])
def test_coins_come_up_at_their_rate(rate):
    coins = Randomness().stream("coins", str(rate)).coins(2_000_000, rate)
    assert stats.binomtest(int(coins.sum()), len(coins), rate).pvalue > RARE


@pytest.mark.parametrize("rate", [1e-30, 5e-324])
def test_tiny_rates_never_come_up_and_cost_nothing(rate):
    assert not Randomness(0).stream("coins").coins(1_000_000, rate).any()


def test_a_coin_looks_at_80_bits():
    """A rate that differs from another only after the 16th bit: the coins in between decide."""
    stream = Randomness(3).stream("coins")
    count = 1 << 18
    first = stream.words(count, np.uint16)
    low, high = Fraction(7, 1 << 16), Fraction(8, 1 << 16)
    middle = float(low + (high - low) / 3)
    coins = stream.coins(count, middle)
    assert coins[first < 7].all()
    assert not coins[first > 7].any()
    share = coins[first == 7]
    assert 0 < share.sum() < len(share)
    assert (stream.coins(count, float(high)) >= coins).all()
    assert (stream.coins(count, float(low)) <= coins).all()


def test_a_coin_is_its_own():
    stream = Randomness(3).stream("coins")
    assert (stream.coins(1000, 0.3) == stream.coins(5000, 0.3)[:1000]).all()


def test_all_subsets_are_equally_likely():
    source, counts = Randomness(), {}
    for step in range(6000):
        subset = tuple(sorted(source.stream("subset", step).subset(5, 2).tolist()))
        counts[subset] = counts.get(subset, 0) + 1
    assert len(counts) == math.comb(5, 2)
    assert stats.chisquare(list(counts.values())).pvalue > RARE


def test_all_orders_are_equally_likely():
    source, counts = Randomness(), {}
    for step in range(6000):
        order = tuple(source.stream("order", step).permutation(4).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == math.factorial(4)
    assert stats.chisquare(list(counts.values())).pvalue > RARE


def test_ties_are_drawn_again(monkeypatch):
    """With keys of few values, ties are the rule; orders are still equally likely."""
    words = Stream.words

    def few(self, count, dtype, parameter=0):
        return words(self, count, dtype, parameter) % 8

    monkeypatch.setattr(Stream, "words", few)
    counts: dict[tuple[int, ...], int] = {}
    source = Randomness()
    for step in range(3000):
        order = tuple(source.stream("order", step).permutation(3).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert stats.chisquare(list(counts.values())).pvalue > RARE


def test_empty_draws():
    stream = Randomness(0).stream("nothing")
    assert [t.numel() for t in stream.normals([0, 3, 0], CPU)] == [0, 3, 0]
    assert len(stream.coins(0, 0.5)) == len(stream.permutation(0)) == len(stream.subset(0, 0)) == 0


@pytest.mark.parametrize("sizes", [[7, 1, 0, 8, 13, 2], [4, 2, 6], [1], [16, 3], [0], [20_001, 5]])
def test_a_vector_of_draws_is_each_parameter_drawn_alone(sizes) -> None:
    stream, places = Randomness(4).stream("noise", 2), [9 + 3 * i for i in range(len(sizes))]
    alone = [
        stream.normals([size], CPU, [place])[0] for size, place in zip(sizes, places, strict=True)
    ]
    flat = stream.flat_normals(sizes, CPU, places)
    assert torch.equal(flat, torch.cat(alone))
    for size, place, drawn in zip(sizes, places, alone, strict=True):
        bits = stream.keystream(8 * (size + size % 2), parameter=place)  # from a cipher of its own
        words = np.frombuffer(bits, np.uint64) & np.uint64((1 << 53) - 1)
        radius = np.sqrt(-2 * np.log((words[::2] + 0.5) * 2.0**-53))
        angle = words[1::2] * (math.pi * 2.0**-52)
        expected = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).ravel()
        np.testing.assert_allclose(drawn.numpy(), expected[:size], rtol=1e-13, atol=1e-15)
