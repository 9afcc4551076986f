"""Shadow memory: labels, views, reused memory, and what is noticed where."""

from __future__ import annotations

import random
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
import torch.nn.functional as F
from record_attack import attack, w, x
from torch import Tensor, nn
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

from tacit.checks.isolation import Event
from tacit.engines.plain_programs import plain_program
from tacit.engines.shadow import Shadow
from tacit.engines.shadow_calls import RULES, Call
from tacit.engines.shadow_labels import LabelMemory, combine, layout, reduce_labels

# --- the algebra and the layout -------------------------------------------------------------------


def test_join_is_associative_and_commutative() -> None:
    values = torch.tensor([-1, 0, 1, 2])
    a, b, c = (t.reshape(-1) for t in torch.meshgrid(values, values, values, indexing="ij"))
    assert torch.equal(combine(a, b), combine(b, a))
    assert torch.equal(combine(combine(a, b), c), combine(a, combine(b, c)))
    assert torch.equal(combine(a, a), a)
    stacked = torch.stack([a, b, c], 1).int()
    assert torch.equal(reduce_labels(stacked, 1), combine(a, b, c).int())
    assert reduce_labels(stacked[:0], 0).tolist() == [0, 0, 0]
    assert torch.equal(reduce_labels(stacked[:, :1].expand(-1, 9), 1), a.int())


def test_layouts() -> None:
    records = torch.arange(1, 4, dtype=torch.int32)
    assert layout(torch.zeros(3, 4, dtype=torch.int32), 3).kind == "public"
    assert layout(torch.tensor([1, -1]), 3).kind == "mixed"

    found = layout(records.view(1, 3, 1).expand(3, 3, 3), 3)
    assert (found.kind, found.dim, found.outer, found.inner) == ("blocks", 1, 1, 1)
    found = layout(records.repeat_interleave(3)[:, None].expand(9, 3), 3)
    assert (found.kind, found.dim, found.outer, found.inner) == ("blocks", 0, 1, 3)
    found = layout(records.repeat(2), 3)
    assert (found.kind, found.dim, found.outer, found.inner) == ("blocks", 0, 2, 1)

    found = layout(torch.tensor([[2, 2], [1, 0], [0, 0]]), 3)
    assert (found.kind, found.dim) == ("rows", 0)
    assert found.ids is not None
    assert found.ids.tolist() == [1, 0, -1]
    found = layout(torch.tensor([[1, 2, 0], [2, 0, 1]]), 3)
    assert found.kind == "scattered"
    assert found.ids is not None
    assert found.ids.tolist() == [[0, 1, -1], [1, -1, 0]]
    assert layout(torch.ones(5, 2, dtype=torch.int32), 1).inner == 5
    assert layout(torch.tensor(1), 1).kind == "scattered"


# --- memory ---------------------------------------------------------------------------------------


def test_reused_memory_never_carries_old_labels() -> None:
    """Thousands of storages come and go; each live tensor keeps exactly its own label."""
    rng = random.Random(0)
    shadow = Shadow(5)
    pool: list[tuple[Tensor, int]] = []
    with shadow:
        for step in range(1200):
            size = rng.choice([1, 4, 64])
            owner = rng.randrange(6)
            tensor = torch.full((size,), float(owner))
            if owner:
                shadow.labels(tensor).fill_(owner)
            if pool and rng.random() < 0.5:
                other, other_owner = rng.choice(pool)
                tensor = tensor[:1] + other[:1]
                owner = (
                    owner
                    if owner == other_owner or not other_owner
                    else -1
                    if owner
                    else other_owner
                )
            elif rng.random() < 0.2:
                tensor, owner = torch.zeros(size), 0
            pool.append((tensor, owner))
            if len(pool) > 40:
                pool.pop(rng.randrange(len(pool)))
            if step % 50 == 0:
                assert all(bool((shadow.labels(t) == label).all()) for t, label in pool)


def test_memory_of_storages_that_died_is_given_back() -> None:
    memory = LabelMemory()
    for _ in range(1200):
        memory.write(torch.zeros(4), 1)
    assert len(memory) < 1000


def test_views_share_labels_and_public_writes_clear_them() -> None:
    shadow = Shadow(3)
    a = torch.zeros(3, 4)
    shadow.mark(a)
    assert shadow.labels(a.t())[0].tolist() == [1, 2, 3]
    with shadow:
        a[1] = 0
        b = a.t().contiguous()
        a.zero_()
    assert shadow.labels(b)[0].tolist() == [1, 0, 3]
    assert not shadow.private(a)
    c = torch.zeros(1).expand(3, 2)
    shadow.mark(c)
    assert (shadow.labels(c) == -1).all()


def test_every_view_has_the_labels_of_its_elements() -> None:
    """Storages keep one label per row where they can; views of any strides must not notice."""
    rng = random.Random(0)
    for _ in range(300):
        shape = [rng.randint(1, 5) for _ in range(rng.randint(1, 4))]
        source = torch.zeros(shape).permute(rng.sample(range(len(shape)), len(shape)))
        labels = torch.zeros(source.shape, dtype=torch.int32)
        dim = rng.randrange(source.dim())
        labels += torch.arange(source.shape[dim]).view([-1] + [1] * (source.dim() - dim - 1))
        memory = LabelMemory()
        memory.write(source, labels)
        flat = torch.zeros(source.numel(), dtype=torch.int32)
        flat.as_strided(source.shape, source.stride()).copy_(labels)
        for _ in range(4):
            sizes = [rng.randint(1, 3) for _ in range(rng.randint(0, 3))]
            strides = [rng.randint(0, 4) for _ in sizes]
            extent = sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
            if extent >= source.numel():
                continue
            view = (sizes, strides, rng.randrange(source.numel() - extent))
            found = memory.find(source.as_strided(*view))
            assert found is not None
            assert torch.equal(found, flat.as_strided(*view))
            if len(set(strides)) == len(strides) and rng.random() < 0.3:
                memory.write(source.as_strided(*view), 7)
                everything = memory.open(source.as_strided((source.numel(),), (1,)))
                assert (everything.as_strided(*view) == 7).all() or (everything < 0).any()
                flat = everything.clone()


def test_records_that_share_one_element_meet() -> None:
    shadow = Shadow(2)
    a = torch.zeros(2, 2, dtype=torch.int32)
    shadow.mark(a)
    with shadow:
        b = a.t().contiguous().view(torch.int64)
    assert (shadow.labels(b) == -1).all()
    assert [event.operator for event in shadow.meetings] == ["aten.view"]
    with pytest.raises(ValueError, match="pass labels="):
        shadow.mark(torch.zeros(5))


def test_overlapping_windows_are_conservative() -> None:
    shadow = Shadow(2)
    source = torch.ones(2, 2)
    shadow.mark(source)
    memory = torch.zeros(3)
    with shadow:
        memory.as_strided((2, 2), (1, 1)).copy_(source)
    assert (shadow.labels(memory) == -1).all()


def test_random_programs_are_sound() -> None:
    steps: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda a, b: a + b,
        lambda a, b: a * b.mean(1, keepdim=True),
        lambda a, b: torch.cat([a[:, :2], b[:, 1:2]], 1),
        lambda a, b: a.t().contiguous(),
        lambda a, b: a.softmax(-1),
        lambda a, b: a @ b,
        lambda a, b: a.roll(1, 1),
        lambda a, b: a[[0, 0, 2]],
        lambda a, b: a.clone().index_add_(1, torch.tensor([0, 0, 1]), b),
        lambda a, b: torch.where(a > 0.5, a, b),
        lambda a, b: a.cumsum(1),
        lambda a, b: a.clone().fill_(1.0) * b[0],
        lambda a, b: F.layer_norm(a, (3,)),
        lambda a, b: a.sort(-1).values,
        lambda a, b: a.detach() * 0 + b,
        lambda a, b: a.clone().masked_fill_(b > 0.6, 0.0),
        lambda a, b: a.view(-1)[::2].repeat(2)[:9].view(3, 3),
    ]
    for seed in range(25):
        rng = random.Random(seed)
        plan = [(rng.choice(steps), rng.randrange(9), rng.randrange(9)) for _ in range(7)]

        def program(a: Tensor, b: Tensor, plan: list = plan) -> list[Tensor]:
            values = [a, b]
            for step, i, j in plan:
                values.append(step(values[i % len(values)], values[j % len(values)]))
                if i == j:
                    values[-1] = values[-1].clone()
                    values[-1][1:] += values[0][:2]
            return values

        torch.manual_seed(seed)
        _, _, shadow = attack(program, [x(3, 3), w(3, 3)])
        assert not shadow.unknown


# --- what is noticed ------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, body: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.last = nn.Linear(8, 3)
        self.norm = nn.BatchNorm1d(8)
        self.body = body
        self.register_buffer("memory", torch.zeros(8))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(torch.relu(self.body(self, self.first(inputs))))


def remember(net: Net, z: Tensor) -> Tensor:
    net.memory = 0.9 * net.memory + 0.1 * z.detach().mean(0)
    return z - net.memory


def write_across(net: Net, z: Tensor) -> Tensor:
    z = z.clone()
    z[0] = z[1]
    return z


def batch_norm_eval(net: Net, z: Tensor) -> Tensor:
    return net.norm.eval()(z)


def branch(net: Net, z: Tensor) -> Tensor:
    return z * 2 if z.max() > 1 else z


def examine(body: Callable[[Net, Tensor], Tensor], n: int = 6) -> tuple[Shadow, Net, Tensor]:
    torch.manual_seed(0)
    net = Net(body)
    inputs, target = torch.randn(n, 5), torch.randint(0, 3, (n,))
    shadow = Shadow(n)
    shadow.mark(inputs)
    shadow.mark(target)
    with shadow:
        losses = F.cross_entropy(net(inputs), target, reduction="none")
    return shadow, net, losses.detach()


MEETINGS = [
    (lambda net, z: net.norm(z), "aten.native_batch_norm", "net.norm(z)"),
    (lambda net, z: z - z.detach().mean(0), "aten.mean", "z.detach().mean(0)"),
    (lambda net, z: z + 1e-9 * z.roll(1, 0), "aten.add", "z.roll(1, 0)"),
    (lambda net, z: z + 0.0 * z.mean(0), "aten.mean", "0.0 * z.mean(0)"),
    (lambda net, z: (z @ z.T)[:, :1] + z, "aten.mm", "z @ z.T"),
    (lambda net, z: z * z.softmax(0), "aten._softmax", "z.softmax(0)"),
    (remember, "aten.mean", "z.detach().mean(0)"),
    (write_across, "aten.nll_loss_forward", "F.cross_entropy"),
    (branch, "aten.max", "z.max() > 1"),
]


@pytest.mark.parametrize(("body", "operator", "line"), MEETINGS)
def test_meetings_are_found_with_their_source_line(
    body: Callable, operator: str, line: str
) -> None:
    shadow, _, losses = examine(body)
    first = shadow.meetings[0]
    assert first.operator == operator
    assert first.where.startswith("test_shadow.py:")
    assert line in first.where
    if body is not branch:
        assert layout(shadow.labels(losses), 6).kind == "mixed"


@pytest.mark.parametrize(
    "body",
    [
        lambda net, z: z,
        batch_norm_eval,
        lambda net, z: z - z.detach().mean(1, keepdim=True),
        lambda net, z: z + 1e-9 * z.roll(1, 1),
        lambda net, z: z * z.softmax(1),
        lambda net, z: (z[:, :, None] @ z[:, None])[..., 0] + z,
        lambda net, z: z - 0.9 * net.memory,
    ],
)
def test_harmless_twins_are_clean(body: Callable) -> None:
    shadow, _, losses = examine(body)
    assert not shadow.meetings + shadow.value_reads + shadow.selections + shadow.unknown
    assert layout(shadow.labels(losses), 6).kind == "blocks"


def suppress_all(act: Callable[[], object]) -> None:
    with suppress(Exception):
        act()


@pytest.mark.parametrize(
    ("look", "operator"),
    [
        (lambda z: bool(z.max() > 1), "aten._local_scalar_dense"),
        (lambda z: float(z[0, 0]), "aten._local_scalar_dense"),
        (lambda z: torch.equal(z, z + 1), "aten.equal"),
        (lambda z: z.tolist(), "Tensor.tolist"),
        (lambda z: z.detach().numpy(), "Tensor.numpy"),
        (lambda z: z.detach().cpu().__array__(), "Tensor.__array__"),
        (lambda z: z.detach().__dlpack__(), "Tensor.__dlpack__"),
        (lambda z: z.unique(), "aten._unique2"),
        (lambda z: z.repeat_interleave((z[:, 0] > 0).long() + 1, 0), "aten.repeat_interleave"),
        (lambda z: torch.zeros(9)[: int((z > 0).sum())], "aten._local_scalar_dense"),
        (lambda z: f"{z}", "Tensor.__format__"),
        (lambda z: torch.tensor([z[:, j].detach().mean() for j in range(3)]), "Tensor.tensor"),
        (lambda z: torch.tensor(data=[[1.0, z.detach()[0, 0]]]), "Tensor.tensor"),
        (lambda z: torch.tensor(deque([z.detach()[0, :1]])), "Tensor.tensor"),
        (lambda z: torch.as_tensor((z.detach()[0, 0],)), "Tensor.as_tensor"),
        (lambda z: torch.asarray([z.detach()[0, 0]]), "Tensor.asarray"),
        (lambda z: torch.ones(1).new_tensor([z.detach()[0, 0]]), "Tensor.new_tensor"),
        (lambda z: torch.ones(1).new([z.detach()[0, 0]]), "Tensor.new"),
        (lambda z: torch.Tensor([z.detach()[0, 0]]), "Tensor.__float__"),
        (lambda z: torch.FloatTensor([z.detach()[0, 0]]), "Tensor.__float__"),
        (lambda z: torch.LongTensor([z[0].argmax()]), "Tensor.__index__"),
        (lambda z: torch.sparse_coo_tensor([[0]], [z.detach()[0, 0]]), "Tensor.sparse_coo_tensor"),
        (lambda z: torch.arange(9)[[[0, z[0].argmax()]]], "Tensor.__getitem__"),
        (lambda z: torch.arange(9).__setitem__([[z[0].argmax()]], 1), "Tensor.__setitem__"),
        (lambda z: z.detach().clone().apply_(abs), "Tensor.apply_"),
        (lambda z: torch.ones(z.shape).map_(z.detach(), max), "Tensor.map_"),
        (lambda z: torch.ones(z.shape).map2_(z.detach(), z.detach(), max), "Tensor.map2_"),
        (lambda z: suppress_all(lambda: z.detach() @ z.detach()), "the error of aten.mm"),
        (lambda z: suppress_all(lambda: F.one_hot(z.long() - 9, 3)), "the error of one_hot"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_value_reads_are_noticed(look: Callable, operator: str) -> None:
    def body(net: Net, z: Tensor) -> Tensor:
        look(z)
        look(torch.ones(3, 3))
        return z

    shadow, _, _ = examine(body)
    assert operator in [event.operator for event in shadow.value_reads]
    assert all(
        "look(z)" in e.where or "test_looks" in e.where or "lambda z" in e.where
        for e in shadow.value_reads
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda z: torch.tensor(z.detach()),
        lambda z: torch.ones(1).new_tensor(z.detach()),
        lambda z: torch.tensor([1.0, float(z.shape[1])]).expand(6, 2),
        lambda z: z[:, torch.tensor([0, 1])],
        lambda z: z[[[0, 1, 2]], [0, 1, 2]],
        lambda z: torch.arange(9)[z.detach().argmax(1),],
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_from_what_is_no_private_scalar_are_no_value_reads(make: Callable) -> None:
    assert not examine(lambda net, z: (make(z), z)[1])[0].value_reads


class LooksBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx, cotangent: Tensor) -> Tensor:
        return cotangent * float(cotangent.detach().numpy().max())


def grad_of(value: Tensor, at: Tensor, **options: bool) -> object:
    return torch.autograd.grad(value.sum(), at, **options)


def reads_in_checkpoint(z: Tensor) -> Tensor:
    z.detach().numpy()
    return z.sin()


@pytest.mark.parametrize(
    "differentiate",
    [
        lambda z: grad_of(LooksBack.apply(z * z).exp(), z),
        lambda z: grad_of(LooksBack.apply(z * z).exp(), z, materialize_grads=True),
        lambda z: torch.autograd.backward(LooksBack.apply(z * z).exp().sum(), inputs=[z]),
        lambda z: LooksBack.apply(z * z).exp().sum().backward(),
        lambda z: LooksBack.apply(z * z).backward(z.detach()),
        lambda z: F.triplet_margin_with_distance_loss(
            z, z, z, distance_function=lambda a, b: (a.detach().numpy(), (a - b).sum(1))[1]
        ),
    ],
)
def test_value_reads_are_noticed_in_code_that_pytorch_calls_back(differentiate: Callable) -> None:
    def body(net: Net, z: Tensor) -> Tensor:
        differentiate(z.detach().requires_grad_())
        return z

    shadow, _, _ = examine(body)
    assert "Tensor.numpy" in [event.operator for event in shadow.value_reads]


def test_value_reads_are_noticed_when_a_checkpointed_block_runs_again() -> None:
    seen: list[int] = []

    def body(net: Net, z: Tensor) -> Tensor:
        a = z.detach().requires_grad_()
        b = checkpoint(reads_in_checkpoint, a, use_reentrant=False)
        seen.append(len(shadow.value_reads))
        shadow.phase = "backward"
        grad_of(b, a)
        return z

    inputs = torch.randn(6, 5)
    shadow = Shadow(6)
    shadow.mark(inputs)
    with shadow:
        Net(body)(inputs)
    assert seen == [1]
    assert [event.operator for event in shadow.value_reads] == ["Tensor.numpy"] * 2
    assert [event.phase for event in shadow.value_reads] == ["forward", "backward"]


def test_differentiation_inside_a_program_is_what_it_is_outside() -> None:
    """Modes stay active in it, and give the same gradients, errors and `.grad`."""
    a, unused = torch.randn(3, requires_grad=True), torch.randn(2, requires_grad=True)

    def run() -> list:
        a.grad = None
        b = a * a
        c = (b * b).sum()
        found = [*torch.autograd.grad(c, [a, b], create_graph=True)]
        if TorchVersion(torch.__version__) >= (2, 10):
            found += torch.autograd.grad(c, {"a": a}, retain_graph=True).values()
        found += torch.autograd.grad(
            b, [a, unused], torch.ones(3), retain_graph=True, materialize_grads=True
        )
        found += torch.autograd.grad(b, a, torch.eye(3), retain_graph=True, is_grads_batched=True)
        found += torch.autograd.grad(c, unused, retain_graph=True, allow_unused=True)
        found += torch.func.vjp(torch.sin, a.detach())[1](torch.ones(3))
        found.append(torch.func.jacrev(torch.sin)(a.detach()))
        torch.autograd.backward([c], inputs=[b], retain_graph=True)
        found += [b.grad, a.grad]
        c.backward(torch.tensor(2.0), retain_graph=True)
        found.append(a.grad.clone())
        for wrong in (
            lambda: torch.autograd.grad(c, unused),
            lambda: torch.autograd.grad(torch.ones(()), a),
            lambda: torch.autograd.grad(c, torch.ones(2)),
            lambda: b.backward(),
        ):
            with pytest.raises(RuntimeError) as caught:
                wrong()
            found.append(str(caught.value))
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = run()
        with Shadow(2), plain_program():
            found = run()
    for one, other in zip(found, expected, strict=True):
        if isinstance(one, Tensor):
            torch.testing.assert_close(one, other)
        else:
            assert one == other


@pytest.mark.parametrize(
    "use",
    [
        lambda z: torch.nested.as_nested_tensor(list(z), layout=torch.jagged).sum(1),
        lambda z: torch.nested.nested_tensor(
            [r[: 2 + k] for k, r in enumerate(z.detach())], layout=torch.jagged
        ).to_padded_tensor(0.0, (6, 8)),
        lambda z: torch.nested.to_padded_tensor(torch.nested.as_nested_tensor(list(z)), 0.0),
        lambda z: torch.nested.nested_tensor_from_jagged(z, torch.tensor([0, 2, 6])).sin().values(),
        lambda z: torch.masked.masked_tensor(z.detach(), z.detach() > 0).sum(0).to_tensor(0.0),
        lambda z: torch.sparse.mm(z.detach().to_sparse(), torch.ones(8, 8)),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_without_labels_of_their_own_are_denied(use: Callable) -> None:
    shadow, _, _ = examine(lambda net, z: (use(z), z)[1])
    assert shadow.unknown
    public, _, _ = examine(lambda net, z: (use(torch.ones(6, 8)), z)[1])
    assert all("masked" in event.where for event in public.unknown)


def test_a_rule_that_cannot_label_is_an_unknown_operator(monkeypatch) -> None:
    def fails(call: Call) -> None:
        raise TypeError("no labels")

    for name in ("exp", "add"):
        monkeypatch.setitem(RULES, name, fails)
    shadow = Shadow(3)
    a, b = torch.ones(3), torch.ones(3)
    shadow.mark(a)
    with shadow:
        c = a.exp()
        b.add_(a)
    assert [event.operator for event in shadow.unknown] == ["aten.exp", "aten.add_"]
    assert (shadow.labels(c) == -1).all()
    assert (shadow.labels(b) == -1).all()


@pytest.mark.parametrize(
    "body",
    [
        lambda a, dim=-1: (torch.rand(3), a[..., ::2].clone())[1],
        lambda a, dim=-1: a.add_(1)[..., ::2].clone(),
        lambda a, dim=-1: a[..., ::2].clone() if a.max() > 0 else a[..., 1::2].clone(),
        lambda a, dim=-1: a.clone(),
    ],
)
def test_decompositions_that_draw_write_or_look_are_not_trusted(
    body: Callable, monkeypatch
) -> None:
    monkeypatch.setitem(torch._decomp.decomposition_table, torch.ops.aten.glu.default, body)
    shadow = Shadow(3)
    a = torch.randn(3, 4)
    before, state = a.clone(), torch.get_rng_state()
    shadow.mark(a)
    with shadow:
        out = F.glu(a)
    assert [event.operator for event in shadow.unknown] == ["aten.glu"]
    assert (shadow.labels(out) == -1).all()
    assert not shadow.value_reads
    assert torch.equal(a, before)
    assert torch.equal(torch.get_rng_state(), state)


def test_an_event_inside_a_decomposition_is_the_operators() -> None:
    shadow = Shadow(3)
    a, b = torch.rand(3, 4), torch.rand(3, 4)
    shadow.mark(a)
    seen: list[str] = []
    shadow.on_record = lambda func: seen.append(str(func))
    with shadow:
        F.huber_loss(a, b)
        F.glu(a)
    assert [event.operator for event in shadow.meetings] == ["aten.huber_loss"]
    assert seen == ["aten.huber_loss.default", "aten.glu.default"]


def test_an_operand_that_gets_another_shape_is_denied() -> None:
    shadow = Shadow(3)
    a = torch.ones(1)
    shadow.labels(a).fill_(1)
    with shadow:
        a.addbmm_(torch.ones(2, 3, 4), torch.ones(2, 4, 5))
    assert [event.operator for event in shadow.unknown] == ["aten.addbmm_"]
    assert (shadow.labels(a) == -1).all()


def test_a_number_from_an_unknown_operator_is_denied() -> None:
    library = torch.library.Library("tacit_numbers", "DEF")
    library.define("largest(Tensor a) -> float")
    library.impl("largest", lambda a: float(a.detach().numpy().max()), "CPU")
    shadow = Shadow(3)
    a = torch.ones(3)
    shadow.mark(a)
    with shadow:
        torch.ops.tacit_numbers.largest(torch.ones(2))
        assert not shadow.unknown
        torch.ops.tacit_numbers.largest(a)
    assert [event.operator for event in shadow.unknown] == ["tacit_numbers.largest"]


@pytest.mark.parametrize(
    ("select", "operator"),
    [
        (lambda z: z[z[:, 0] > 0], "aten.index"),
        (lambda z: z[z > 0], "aten.index"),
        (lambda z: torch.where(z > 0), "aten.nonzero"),
        (lambda z: z.masked_select(z > 0), "aten.masked_select"),
        (lambda z: z[torch.arange(6) + 0 * z.argmax(1)], "aten.index"),
    ],
)
def test_selections_are_noticed_and_labels_follow(select: Callable, operator: str) -> None:
    shadow, _, losses = examine(lambda net, z: (select(z), z)[1])
    assert operator in [event.operator for event in shadow.selections]
    assert not shadow.value_reads
    assert layout(shadow.labels(losses), 6).kind == "blocks"


def test_raw_memory_of_private_tensors_is_noticed() -> None:
    shadow, _, _ = examine(lambda net, z: (z.data_ptr(), torch.ones(2).data_ptr(), z)[2])
    assert [event.operator for event in shadow.unknown] == ["Tensor.data_ptr"]


def test_unknown_operator_is_denied_and_named() -> None:
    library = torch.library.Library("tacit_test", "DEF")
    library.define("mix(Tensor a, Tensor b) -> Tensor")
    library.impl("mix", lambda a, b: a + b.mean(0), "CompositeExplicitAutograd")
    shadow = Shadow(3)
    a = torch.ones(3, 2)
    shadow.mark(a)
    with shadow:
        public = torch.ops.tacit_test.mix(torch.ones(2), torch.ones(2))
        mixed = torch.ops.tacit_test.mix(a, a)
    assert not shadow.private(public)
    assert (shadow.labels(mixed) == -1).all()
    assert [event.operator for event in shadow.unknown] == ["tacit_test.mix"]
    assert not shadow.meetings


def test_phase_and_callback() -> None:
    shadow = Shadow(3)
    seen: list[str] = []
    shadow.on_record = lambda func: seen.append(str(func))
    layer = nn.Linear(2, 2)
    inputs, ones = torch.ones(3, 2), torch.ones(3, 2)
    shadow.mark(inputs)
    shadow.mark(ones)
    with shadow:
        out = layer(inputs)
        shadow.phase = "backward"
        weight_grad, _ = torch.autograd.grad(out, list(layer.parameters()), ones)
        weight_grad + 1
        torch.ones(2) + 1
    assert (shadow.labels(weight_grad) == -1).all()
    assert {event.phase for event in shadow.meetings} == {"backward"}
    assert "out = layer(inputs)" in shadow.meetings[0].where
    assert "aten.addmm.default" in seen
    assert "aten.add.Tensor" not in seen
    assert isinstance(shadow.meetings[0], Event)


def test_public_operands_may_have_more_dimensions_than_private_ones() -> None:
    shadow, x = Shadow(4), torch.randn(4, 3, 1)
    shadow.mark(x)
    with shadow:
        found = torch.linalg.solve_triangular(torch.eye(3).expand(4, 1, 3, 3), x, upper=True)
    labels = shadow.labels(found)  # of (system, record, …)
    assert bool((labels == torch.arange(1, 5)[None, :, None, None]).all())


def test_a_group_norm_over_other_sizes_than_its_inputs_is_not_known() -> None:
    shadow, x = Shadow(4), torch.randn(4, 3, 1)
    shadow.mark(x)
    with shadow:
        torch.native_group_norm(x, None, None, 1, 12, 1, 1, 1e-5)  # over all records
    assert [event.operator for event in shadow.unknown] == ["aten.native_group_norm"]


def test_private_rows_that_private_indices_look_up_are_a_selection() -> None:
    shadow, x, index = Shadow(4), torch.randn(4, 3), torch.arange(4)
    for tensor in (x, index):
        shadow.mark(tensor)
    with shadow:
        F.embedding_bag(index[:, None], x, mode="sum")
    assert shadow.selections
