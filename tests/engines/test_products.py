"""Per-record gradients of matrices: exact in float64, never too small a norm in float32."""

from __future__ import annotations

import itertools

import pytest
import torch
from gradient_checks import (
    TINY,
    UNIT,
    check_exact,
    check_left_out,
    check_traceable,
    outer_products,
    share,
    table_gradients,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from tacit.engines import products
from tacit.engines.clipping import Moved, RowScale, Stacked, sum_of_squares
from tacit.engines.products import (
    Contracted,
    Dense,
    Gram,
    Lookup,
    ghost_norms,
    in_pieces,
    matrix_gradients,
    sum_depth,
    sum_over_pairs,
)

SEEDS = st.integers(0, 10**6)


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def repeated(positions, width, value):
    """Equal numbers: every partial sum is rounded the same way."""
    return torch.full((1, positions, width), value)


def cancelling(positions, width_a, width_b, size, rest):
    """Terms of norm `size` whose sum has a norm of about `rest`."""
    a = torch.randn(1, 1, width_a).expand(1, positions, width_a).clone()
    b = torch.randn(1, positions, width_b)
    b[:, -1] = -b[:, :-1].sum(dim=1)
    return size * a + rest * torch.randn_like(a), b


def rows_of(uses) -> torch.Tensor:
    """Record by record and position by position, in loops."""
    tables = []
    for i in range(len(uses[0].a_BTD if isinstance(uses[0], Dense) else uses[0].b_BTD)):
        row = 0.0
        for use in uses:
            if isinstance(use, Dense):
                for a, b in zip(use.a_BTD[i], use.b_BTP[i], strict=True):
                    row = row + torch.outer(b, a)
            else:
                for token, b in zip(use.tokens_BT[i], use.b_BTD[i], strict=True):
                    one = torch.zeros(use.num_rows, len(b), dtype=b.dtype)
                    one[token] = b
                    row = row + one
        tables.append(row)
    return torch.stack(tables)


# Exact, in float64.


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 3),
    positions=st.integers(1, 6),
    widths=st.tuples(st.integers(1, 200), st.integers(1, 200)),
    seed=SEEDS,
)
def test_outer_products(batch, positions, widths, seed):
    torch.manual_seed(seed)
    a, b = randn(batch, positions, widths[0]), randn(batch, positions, widths[1])
    check_exact(outer_products(a, b), rows_of([Dense(a, b)]))


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 3),
    positions=st.integers(1, 6),
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 9)),
    seed=SEEDS,
)
def test_tables(batch, positions, sizes, seed):
    """Tokens that repeat, and tokens that count from the end."""
    torch.manual_seed(seed)
    num_rows, width = sizes
    tokens = torch.randint(-num_rows, num_rows, (batch, positions))
    b = randn(batch, positions, width)
    check_exact(table_gradients(num_rows, tokens, b), rows_of([Lookup(num_rows, tokens, b)]))


@settings(max_examples=100, deadline=None)
@given(
    counts=st.lists(st.tuples(st.booleans(), st.integers(1, 4)), min_size=1, max_size=4),
    sizes=st.tuples(st.integers(1, 60), st.integers(1, 60)),
    seed=SEEDS,
)
def test_several_uses_of_one_matrix(counts, sizes, seed):
    torch.manual_seed(seed)
    num_rows, width = sizes
    uses = [
        Dense(randn(2, positions, width), randn(2, positions, num_rows))
        if dense
        else Lookup(
            num_rows,
            torch.randint(-num_rows, num_rows, (2, positions)),
            randn(2, positions, width),
        )
        for dense, positions in counts
    ]
    check_exact(matrix_gradients(uses), rows_of(uses))


def test_an_embedding_tied_to_the_output_head_against_autograd():
    torch.manual_seed(0)
    vocabulary, width, positions = 90, 60, 5
    table = randn(vocabulary, width).requires_grad_()
    tokens = torch.randint(0, vocabulary, (3, positions))
    rows, hidden, logits_b, embedded_b = [], [], [], []
    for i in range(3):
        e = torch.nn.functional.embedding(tokens[i], table)
        h = torch.tanh(e)
        logits = h @ table.T
        loss = torch.nn.functional.cross_entropy(logits[:-1], tokens[i, 1:])
        got = torch.autograd.grad(loss, [table, e, logits])
        for to, value in zip((rows, embedded_b, logits_b, hidden), (*got, h.detach()), strict=True):
            to.append(value)
    found = matrix_gradients(
        [
            Lookup(vocabulary, tokens, torch.stack(embedded_b)),
            Dense(torch.stack(hidden), torch.stack(logits_b)),
        ]
    )
    assert isinstance(found, Contracted)
    check_exact(found, torch.stack(rows))


def test_a_large_vocabulary_never_makes_a_table_per_record(monkeypatch):
    """Of the size of GPT-2's, in miniature: norms without any (B, V, D) array."""
    torch.manual_seed(0)
    vocabulary, width, positions = 3000, 64, 6
    largest = 2 * positions * vocabulary  # numbers of b, for two records

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for made in out if isinstance(out, tuple | list) else [out]:
                assert not isinstance(made, torch.Tensor) or made.numel() <= largest
            return out

    tokens, g = torch.randint(0, vocabulary, (2, positions)), torch.randn(2, positions, width)
    a, b = torch.randn(2, positions, width), torch.randn(2, positions, vocabulary)
    with Watch():
        found = matrix_gradients([Lookup(vocabulary, tokens, g), Dense(a, b)])
        squares = found.squares()
    real = found.rows().flatten(1).square().sum(dim=1)
    torch.testing.assert_close(squares, real, rtol=1e-2, atol=0.0)


def test_norms_do_not_depend_on_the_pieces(monkeypatch):
    torch.manual_seed(0)
    tokens, g = torch.randint(0, 90, (7, 3)), randn(7, 3, 80)
    a, b = randn(7, 2, 80), randn(7, 2, 90)
    makers = [
        lambda: outer_products(a, b),
        lambda: table_gradients(90, tokens, g),
        lambda: matrix_gradients([Dense(a, b), Lookup(90, tokens, g)]),
    ]
    whole = [make().squares() for make in makers]
    monkeypatch.setattr(
        products, "in_pieces", lambda count, each, work: in_pieces(count, each, work, 3 * each)
    )
    for make, squares in zip(makers, whole, strict=True):
        torch.testing.assert_close(make().squares(), squares)


def test_tokens_may_be_short_integers():
    torch.manual_seed(0)
    tokens, g = torch.randint(-90, 90, (2, 3)), randn(2, 3, 80)
    a, b = randn(2, 2, 80), randn(2, 2, 90)
    for num_rows in (90, 5):
        given = tokens % num_rows
        short, long = (table_gradients(num_rows, k, g) for k in (given.int(), given))
        assert torch.equal(short.squares(), long.squares())
    short, long = (
        matrix_gradients([Dense(a, b), Lookup(90, k, g)]) for k in (tokens.int(), tokens)
    )
    assert torch.equal(short.squares(), long.squares())


def test_an_empty_batch_adds_nothing():
    for found in (
        outer_products(torch.empty(0, 3, 90), torch.empty(0, 3, 80)),
        table_gradients(90, torch.empty(0, 3, dtype=torch.long), torch.empty(0, 3, 5)),
    ):
        assert found.squares().shape == (0,)
        assert not found.total(RowScale(torch.empty(0))).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_widened_first(dtype):
    torch.manual_seed(0)
    a, b = torch.randn(2, 3, 90).to(dtype), torch.randn(2, 3, 80).to(dtype)
    tokens = torch.tensor([[0, 1, 0], [2, 2, 2]])
    for found, same in (
        (outer_products(a, b), outer_products(a.float(), b.float())),
        (table_gradients(90, tokens, b), table_gradients(90, tokens, b.float())),
    ):
        assert found.squares().dtype == torch.float32
        assert torch.equal(found.squares(), same.squares())
        assert torch.equal(
            found.total(RowScale(torch.ones(2))), same.total(RowScale(torch.ones(2)))
        )


# Never too small, in float32.


@pytest.mark.parametrize("width", [(2000, 64), (16384, 64), (65536, 40), (700, 700)])
@pytest.mark.parametrize("positions", [1, 2, 7])
def test_equal_numbers_keep_the_bound(width, positions):
    for a, b in itertools.product([0.1, 1 / 3, 0.7, 1.1], [0.1, 0.7, 3e7]):
        found = outer_products(repeated(positions, width[0], a), repeated(positions, width[1], b))
        assert share(found, 1e-3) <= 1


def test_many_positions_keep_the_bound():
    for a, b in itertools.product([0.1, 1 / 3, 0.7], [0.1, 1.1]):
        found = outer_products(repeated(200, 900, a), repeated(200, 900, b))
        assert isinstance(found, Contracted)
        assert share(found, 1e-3) <= 1


@pytest.mark.parametrize("size", [1.0, 1e3, 1e6, 1e12])
@pytest.mark.parametrize("rest", [0.0, 1e-6, 1e-3, 1.0])
def test_terms_that_cancel_keep_the_bound(size, rest):
    torch.manual_seed(0)
    for positions in (2, 3, 16):
        for _ in range(5):
            found = outer_products(*cancelling(positions, 300, 400, size, rest))
            assert isinstance(found, Contracted)
            assert share(found, 1e-3) <= 1


@pytest.mark.parametrize("positions", [1, 3])
def test_squares_that_vanish_or_overflow_keep_the_bound(positions):
    """‖b‖² = 0 in float32 for b = 1e-23, but b·a is not nothing when a is 1e18."""
    powers = range(-44, 39, 3)
    for a, b in itertools.product(powers, powers):
        a_BTD, b_BTP = repeated(positions, 50, 10.0**a), repeated(positions, 50, 10.0**b)
        if positions > 1:  # another scale at each position
            a_BTD[:, 1], b_BTP[:, 1] = 10.0**b, 10.0**a
        for max_norm in (1e-9, 1e-3):
            assert share(outer_products(a_BTD, b_BTP), max_norm) <= 1


@pytest.mark.parametrize("size", [1e-22, 1e-3, 1e3, 1e15])
def test_tables_with_terms_that_cancel_or_round_keep_the_bound(size):
    torch.manual_seed(0)
    for tokens in ([0] * 8, [0, 0, 1, 1, 2, 2, 3, 3], list(range(8))):
        for b in (torch.full((1, 8, 300), 0.7), torch.randn(1, 8, 300)):
            b[:, 1] = -b[:, 0]
            for scale in (1.0, 1e-3):
                found = table_gradients(40, torch.tensor([tokens]), size * scale * b)
                assert isinstance(found, Contracted)
                assert share(found, 1e-3) <= 1


@pytest.mark.parametrize("size", [1e-12, 1e-3, 1.0, 1e6, 1e12])
@pytest.mark.parametrize("rest", [0.0, 1e-6, 1e-3])
def test_a_head_that_cancels_its_embedding_keeps_the_bound(size, rest):
    """The look-ups are the negative of the products, up to a small rest."""
    torch.manual_seed(0)
    num_rows, width = 200, 150
    for positions in (1, 4):
        tokens = torch.randint(0, num_rows, (1, positions))
        g = size * torch.randn(1, positions, width)
        one_hot = torch.nn.functional.one_hot(tokens, num_rows).float()
        for factor in (1.0, 0.7, 1e-6):
            dense = Dense(-g * factor, one_hot / factor + rest * torch.randn_like(one_hot))
            found = matrix_gradients([dense, Lookup(num_rows, tokens, g)])
            assert isinstance(found, Contracted)
            for max_norm in (1e-9, 1e-3):
                assert share(found, max_norm) <= 1


def test_joint_squares_that_vanish_or_overflow_keep_the_bound():
    tokens = torch.tensor([[0, 1, 1]])
    for a, b, g in itertools.product(range(-44, 39, 9), repeat=3):
        dense = Dense(repeated(2, 90, 10.0**a), repeated(2, 95, 10.0**b))
        found = matrix_gradients([dense, Lookup(95, tokens, repeated(3, 90, 10.0**g))])
        assert isinstance(found, Contracted)
        for max_norm in (1e-9, 1e-3):
            assert share(found, max_norm) <= 1


def test_a_forgotten_cross_term_would_be_caught(monkeypatch):
    """The planted bug: squares of the two forms, added."""
    monkeypatch.setattr(products, "inner_products", lambda a, g: a @ g.transpose(1, 2) * (a is g))
    g = torch.randn(1, 2, 150)
    tokens = torch.tensor([[3, 5]])
    one_hot = torch.nn.functional.one_hot(tokens, 200).float()
    found = matrix_gradients([Dense(g.clone(), one_hot), Lookup(200, tokens, g)])
    assert share(found, 1e-3) > 1


def vectors(positions, width):
    """Random, equal and of very different sizes."""
    random = torch.randn(2, positions, width)
    yield random
    yield torch.full_like(random, 0.7)
    yield 0.7 * random.sign()
    yield random * 10 ** (3 * torch.randn_like(random))
    yield 1e-22 * random


@pytest.mark.parametrize("width", [1, 7, 100, 128, 129, 3000, 40000])
def test_inner_products_are_off_by_no_more_than_they_say(width):
    """|fl(x_t·x_u) − x_t·x_u| ≤ depth·u·‖x_t‖‖x_u‖ + width·τ."""
    torch.manual_seed(0)
    for x in vectors(5, width):
        found = Gram.of(x)
        exact = x.double() @ x.double().transpose(1, 2)
        length = x.double().norm(dim=2)
        bound = found.depth * UNIT * length[:, :, None] * length[:, None, :] + width * TINY
        assert bool(((found.inner_BTT - exact).abs() <= bound).all())


@pytest.mark.parametrize("positions", [3, 64, 65, 500, 1500])
def test_sums_over_both_positions_round_as_seldom_as_they_say(positions):
    torch.manual_seed(0)
    random = torch.randn(positions, positions)
    for terms in (torch.full_like(random, 0.7), 0.7 * random.sign(), random.exp()):
        error = float((sum_over_pairs(terms) - terms.double().sum()).abs())
        assert error <= sum_depth(positions, positions) * UNIT * float(terms.double().abs().sum())


@pytest.mark.parametrize(
    "shape", [(), (3,), (9000,), (70000,), (300, 400), (64, 64, 3, 3), (2, 3, 5000), (5, 20000)]
)
def test_sums_of_squares_are_upper_bounds(shape):
    torch.manual_seed(0)
    random = torch.randn(2, *shape)
    for x in (random, torch.full_like(random, 0.7), 1e-22 * random):
        for lying in (x, x.transpose(1, -1) if x.dim() > 2 else x):
            exact = lying.double().reshape(2, -1).square().sum(dim=1)
            squares = sum_of_squares(lying).double()
            assert bool((squares >= exact).all())
            assert bool((squares <= exact * 1.001 + 1e-30).all())


@pytest.mark.parametrize("groups", [(), (2,), (2, 3)])
def test_groups_add_up(groups):
    torch.manual_seed(0)
    a, b = randn(3, *groups, 5, 20), randn(3, *groups, 5, 30)
    rows = b.transpose(-1, -2) @ a
    norms_B, reach = ghost_norms(a, b)
    torch.testing.assert_close(norms_B, rows.flatten(1).square().sum(dim=1))
    torch.testing.assert_close(reach, (a.norm(dim=-1) * b.norm(dim=-1)).flatten(1).sum(dim=1))


# Records left out, and tracing.


@pytest.mark.parametrize("shape", [(), (3,), (2, 5, 7), (3000,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scaling_leaves_out_what_has_no_scale(shape, dtype):
    torch.manual_seed(0)
    scale = torch.tensor([0.5, 0.0, 2.0, 0.0])
    x = torch.randn(4, *shape, dtype=dtype)
    column = scale.to(dtype).view(4, *(1 for _ in shape))
    bad = x.clone()
    bad[1], bad[3] = torch.nan, torch.inf
    assert torch.equal(RowScale(scale).of(bad), x * column)
    assert torch.equal(RowScale(scale).present(bad), x * (column != 0))
    assert bad[1].isnan().all()  # what was given is as it was


FORMS = {
    "one position": (outer_products, [(1, 90), (1, 80)], Contracted),
    "rows": (outer_products, [(9, 7), (9, 5)], Stacked),
    "ghost": (outer_products, [(2, 90), (2, 80)], Contracted),
    "table": (lambda b, k: table_gradients(99, k, b), [(4, 6), (4,)], Contracted),
    "small table": (lambda b, k: table_gradients(8, k % 8, b), [(4, 6), (4,)], Stacked),
    "tied": (
        lambda a, b, g, k: matrix_gradients([Lookup(99, k, g), Dense(a, b)]),
        [(2, 90), (2, 99), (4, 90), (4,)],
        Contracted,
    ),
    "tied, small": (
        lambda a, b, g, k: matrix_gradients([Lookup(9, k % 9, g), Dense(a, b)]),
        [(2, 5), (2, 9), (4, 5), (4,)],
        Stacked,
    ),
    "recurrent": (
        lambda a, b, c, d: matrix_gradients([Dense(a, b), Dense(c, d)]),
        [(1, 90), (1, 80), (1, 90), (1, 80)],
        Contracted,
    ),
}
EACH_FORM = pytest.mark.parametrize("name", FORMS)


def drawn(shapes):
    return [torch.randint(0, 99, (4, *s)) if len(s) == 1 else torch.randn(4, *s) for s in shapes]


@EACH_FORM
def test_records_without_a_scale_are_left_out(name):
    torch.manual_seed(0)
    make, shapes, form = FORMS[name]
    arguments = drawn(shapes)
    assert isinstance(make(*arguments), form)
    check_left_out(make, *arguments)


@EACH_FORM
def test_a_trace_serves_other_data(name):
    torch.manual_seed(0)
    make, shapes, _ = FORMS[name]
    check_traceable(make, drawn(shapes), drawn(shapes))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one position", "ghost", "tied"])
def test_a_compiled_step_keeps_the_bound(name):
    """Inductor may change the order of every sum."""
    torch.manual_seed(0)
    make, shapes, _ = FORMS[name]
    arguments = drawn(shapes)

    def step(scale_B, *given):
        found = make(*given)
        return found.squares(), found.total(RowScale(scale_B))

    compiled = torch.compile(step)
    squares, _ = compiled(torch.ones(4), *arguments)
    rows = make(*(x.double() if x.is_floating_point() else x for x in arguments)).rows()
    real = rows.flatten(1).square().sum(dim=1)
    assert bool((squares.double() >= real * (1 - 4 * UNIT)).all())
    torch.testing.assert_close(squares.double(), real, rtol=1e-2, atol=0.0)


def test_scaling_by_zero_alone_would_be_caught():
    """The planted bug: 0 · NaN."""
    a = torch.full((2, 1, 90), torch.nan)
    assert outer_products(a, a).total(RowScale(torch.zeros(2), all_present=True)).isnan().all()
    assert not outer_products(a, a).total(RowScale(torch.zeros(2))).any()


def test_rows_that_lie_with_channels_last_are_read_as_they_lie():
    torch.manual_seed(0)
    lying = randn(4, 5, 3, 2, 6)
    rows = lying.movedim(-1, 2)
    moved = Moved([(Stacked(lying), lambda row: row.movedim(-1, 1))])
    for found in (moved, Stacked(rows), Stacked(rows.contiguous())):
        check_exact(found, rows)


def test_scalars_have_gradients_too():
    found = Stacked(torch.tensor([3.0, torch.nan, -2.0]))
    assert found.total(RowScale(torch.tensor([1.0, 0.0, 0.5]))).item() == 2.0
    torch.testing.assert_close(
        found.squares()[[0, 2]], torch.tensor([9.0, 4.0]), rtol=1e-5, atol=0.0
    )


def test_slices_hold_no_more_than_the_limit():
    def slices(*given):
        seen = []
        in_pieces(*given[:2], lambda part: (seen.append(part), torch.empty(0))[1:], *given[2:])
        return seen

    assert slices(10, 3, 9) == [slice(0, 3), slice(3, 6), slice(6, 9), slice(9, 10)]
    assert slices(2, 100, 9) == [slice(0, 1), slice(1, 2)]
    assert slices(0, 3, 9) == [slice(0, 0)]


def test_inner_products_with_all_digits_are_those_of_the_plain_path():
    torch.manual_seed(0)
    x, y = torch.randn(3, 4, 300), torch.randn(3, 5, 300)
    found = torch.ops.tacit.inner_products(x, y, 128)
    assert torch.equal(found, products.inner_products(x, y))
    torch.library.opcheck(torch.ops.tacit.inner_products.default, (x, y, 128))


def test_nothing_is_read_back():
    """No operator that waits for a value, and no shape that depends on one."""
    graph = check_traceable(outer_products, drawn([(2, 90), (2, 80)]), drawn([(2, 90), (2, 80)]))
    names = {str(node.target) for node in graph.graph.nodes}
    assert not any("nonzero" in name or "_local_scalar" in name for name in names)
