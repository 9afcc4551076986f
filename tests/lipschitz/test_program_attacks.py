"""The program that is bounded is the program that runs: attacks on the difference.

Each attack makes a layer or a model compute 50 times as much as its bound is for. It must be
refused, or leave the gradient of one record within its bound, at every number of records.
"""

from __future__ import annotations

import contextlib
import types

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.utils import parametrize

import tacit
import tacit.lipschitz as lip
from tacit.certificates import certified_radius
from tacit.errors import UnboundedLayer
from tacit.lipschitz.layers import activations as sorting
from tacit.losses import CrossEntropy

LOUD = 50.0


def batch(shape, count):
    torch.manual_seed(1)
    inputs, targets = torch.randn(64, *shape), torch.arange(64) % 3
    return tacit.sampling.batch_of(
        inputs[:count], targets[:count], divisor=1.0, scheme=tacit.sampling.Poisson(0.1)
    )


def network(layer, shape):
    """A parameter before the layer and one after, on records of norm 1."""
    torch.manual_seed(0)
    front = nn.Sequential(lip.BoundedInput(1.0, sphere=True), lip.AddBias(shape[0], 0.1), layer)
    width = front(torch.zeros(2, *shape)).flatten(1).shape[1]
    return nn.Sequential(*front, nn.Flatten(), lip.SpectralLinear(width, 3))


def worst(model, shape, query=None):
    """The most that the last record moves a block by, over its bound, at several batch sizes.

    The gradient of the outputs is clipped far down, so that it is always at its bound.
    """
    query, loss = query or tacit.Clipless(gradient_clip=0.01), CrossEntropy()
    found = []
    for count in (1, 2, 3, 64):
        more, less = (query(model, loss, batch(shape, n)).blocks for n in (count, count - 1))
        for a, b in zip(more, less, strict=True):
            moved = torch.cat([(x - y).flatten() for x, y in zip(a.sums, b.sums, strict=True)])
            found.append(float(moved.norm()) / a.bound)
    return max(found)


def require_contained(model, shape, query=None):
    # A setting or a weight that is missing is Python's own error.
    with contextlib.suppress(UnboundedLayer, AttributeError):
        assert worst(model, shape, query) <= 1 + 1e-5


def louder(found):
    if isinstance(found, torch.Tensor):
        return LOUD * found if found.is_floating_point() else found
    if isinstance(found, float):
        return found / LOUD
    return [] if isinstance(found, list) else found


IMAGE = (4, 4, 4)
EXAMPLES = {
    lip.Absolute: (lambda: lip.Absolute(), IMAGE),
    lip.AddBias: (lambda: lip.AddBias(4), IMAGE),
    lip.AverageResidual: (lambda: lip.AverageResidual(lip.MaxMin()), IMAGE),
    lip.BoundedInput: (lambda: lip.BoundedInput(1.0), IMAGE),
    lip.ClipGradient: (lambda: lip.ClipGradient(0.005), IMAGE),
    lip.Concatenate: (lambda: lip.Concatenate([lip.MaxMin(), lip.Absolute()]), IMAGE),
    lip.ConvexResidual: (lambda: lip.ConvexResidual(lip.MaxMin()), IMAGE),
    lip.FrobeniusLinear: (lambda: lip.FrobeniusLinear(6, 6), (6,)),
    lip.FullSort: (lambda: lip.FullSort(), IMAGE),
    lip.GroupSort: (lambda: lip.GroupSort(2), IMAGE),
    lip.Householder: (lambda: lip.Householder(4), IMAGE),
    lip.LayerCentering: (lambda: lip.LayerCentering(), IMAGE),
    lip.MaxMin: (lambda: lip.MaxMin(), IMAGE),
    lip.OrthogonalConv1d: (lambda: lip.OrthogonalConv1d(4, 4, 3), (4, 6)),
    lip.OrthogonalConv2d: (lambda: lip.OrthogonalConv2d(4, 4, 3), IMAGE),
    lip.Permute: (lambda: lip.Permute(2, 1), (4, 6)),
    lip.Reshape: (lambda: lip.Reshape(8, 3), (4, 6)),
    lip.Residual: (lambda: lip.Residual(lip.MaxMin()), IMAGE),
    lip.Scale: (lambda: lip.Scale(0.5), IMAGE),
    lip.ScaledL2NormPool2d: (lambda: lip.ScaledL2NormPool2d(2), IMAGE),
    lip.Shift: (lambda: lip.Shift((3, 3)), IMAGE),
    lip.SpaceToDepth: (lambda: lip.SpaceToDepth(2), IMAGE),
    lip.SpectralConv1d: (lambda: lip.SpectralConv1d(4, 4, 3, padding=1), (4, 6)),
    lip.SpectralConv2d: (
        lambda: lip.SpectralConv2d(4, 4, 3, padding=1, padding_mode="circular"), IMAGE
    ),
    lip.SpectralConv3d: (lambda: lip.SpectralConv3d(2, 2, 3, padding=1), (2, 3, 3, 3)),
    lip.SpectralLinear: (lambda: lip.SpectralLinear(6, 6), (6,)),
    lip.Sum: (lambda: lip.Sum([lip.MaxMin(), lip.Absolute()]), IMAGE),
    lip.Tokens: (lambda: lip.Tokens(), IMAGE),
}  # fmt: skip
ANSWERS = ("output_norm", "lipschitz", "gradient_norms", "walk_bounds")


def methods_of(kind):
    """Every function of the class that is not PyTorch's own machinery, helpers included."""
    owners = [k for k in kind.__mro__ if k not in (nn.Module, object)]
    names = {
        name
        for owner in owners
        for name, value in vars(owner).items()
        if isinstance(value, types.FunctionType | property) and not name.startswith("__")
    }
    return [*sorted(names), "__call__", "__getattr__"]


def test_every_layer_has_an_example():
    assert {kind.__name__ for kind in EXAMPLES} == set(lip.layers.__all__)


def loud_method(kind, name):
    original = getattr(kind, name)

    def evil(self, *args, **kwargs):
        call = original.fget if isinstance(original, property) else original
        return louder(call(self, *args, **kwargs))

    return property(evil) if isinstance(original, property) else evil


@pytest.mark.parametrize("kind", EXAMPLES, ids=lambda kind: kind.__name__)
def test_an_overridden_helper_in_a_subclass(kind):
    make, shape = EXAMPLES[kind]
    for name in methods_of(kind):
        if name in ANSWERS:
            continue  # a class that gives answers speaks for itself
        layer = make()
        layer.__class__ = type("Evil", (kind,), {name: loud_method(kind, name)})
        try:
            model = network(layer, shape)
        except Exception:
            continue  # it cannot even run
        require_contained(model, shape)


class HalfAnswered(lip.Shift):
    """Answers one of the questions anew, and inherits a constant that its helper breaks."""

    def _move(self, run, by):
        return LOUD * super()._move(run, by)

    def output_norm(self, x):
        return LOUD * x.norm


def test_an_overridden_helper_with_some_of_the_answers():
    model = network(HalfAnswered((3, 3)), IMAGE)
    with pytest.raises(UnboundedLayer, match="HalfAnswered has a _move of its own"):
        worst(model, IMAGE)


@pytest.mark.parametrize("kind", EXAMPLES, ids=lambda kind: kind.__name__)
def test_an_overridden_helper_on_the_instance(kind):
    make, shape = EXAMPLES[kind]
    assert 0.001 < worst(network(make(), shape), shape) <= 1 + 1e-5
    for name in methods_of(kind):
        if isinstance(getattr(kind, name), property):
            continue
        layer = make()
        model, query = network(layer, shape), tacit.Clipless(gradient_clip=0.01)
        query.sensitivities(model, CrossEntropy(), shape)  # compiles it before the attack
        setattr(layer, name, types.MethodType(loud_method(kind, name), layer))
        require_contained(model, shape, query)  # set between two steps
        require_contained(model, shape)


@pytest.mark.parametrize("kind", EXAMPLES, ids=lambda kind: kind.__name__)
def test_a_child_of_a_layer_is_swapped(kind):
    make, shape = EXAMPLES[kind]
    for name, child in make().named_children():
        layer = make()
        loud = lip.Scale(LOUD)
        setattr(layer, name, nn.ModuleList([loud]) if isinstance(child, nn.ModuleList) else loud)
        require_contained(network(layer, shape), shape)


@pytest.mark.parametrize("name", [*ANSWERS, "constraints", "exact", "cotangent_limit", "jump"])
def test_what_an_instance_says_of_itself_is_no_answer(name):
    said = {
        "constraints": lambda: [],
        "exact": True,
        "cotangent_limit": 1e-9,
        "jump": 0.0,
        "output_norm": lambda x: 1e-9,
        "lipschitz": lambda x: 1e-9,
        "gradient_norms": lambda x, cotangent: {"weight": 1e-9},
        "walk_bounds": lambda x, walk: (x, lambda cotangent: 1e-9),
    }[name]
    layer = lip.SpectralLinear(6, 6, max_norm=LOUD)
    model = network(layer, (6,))
    vars(layer)[name] = said
    with pytest.raises(UnboundedLayer, match=f"its {name} was replaced on the instance"):
        worst(model, (6,))


class Number(float):
    """Small where it is compared, large where it multiplies."""

    def __mul__(self, other):
        return LOUD * float(self) * other

    __rmul__ = __mul__


@pytest.mark.parametrize("kind", [lip.BoundedInput, lip.Scale], ids=lambda kind: kind.__name__)
def test_a_setting_is_one_number(kind):
    layer = kind(0.5)
    model = network(layer, (6,))
    for name in ("factor", "max_norm"):
        if hasattr(layer, name):
            setattr(layer, name, Number(0.5))
    require_contained(model, (6,))


class Moody(lip.BoundedInput):
    """A property in the place of a setting: one number for bounds, another for records."""

    asked = 0

    @property
    def max_norm(self):
        Moody.asked += 1
        return 1.0 if Moody.asked < 4 else LOUD

    @max_norm.setter
    def max_norm(self, value):
        pass


def test_a_setting_that_is_a_property():
    model = nn.Sequential(Moody(1.0, sphere=True), lip.SpectralLinear(6, 3))
    require_contained(model, (6,))


class Axis(int):
    """Axis 1 to whoever asks for a bound, and the batch's to PyTorch."""

    def __index__(self):
        return 0

    def __eq__(self, other):
        return other == 1

    def __hash__(self):
        return 1


AXES = {
    "mean": lambda x: torch.cat([x, x.mean(Axis(1), keepdim=True)], 1),
    "cat": lambda x: torch.cat([x, x], Axis(1)),
    "softmax": lambda x: F.softmax(x, dim=Axis(1)),
    "transpose": lambda x: x.transpose(Axis(1), 1),
}


@pytest.mark.parametrize("name", AXES)
def test_an_axis_of_a_traced_operation_is_one_number(name):
    module = type("Own", (nn.Module,), {"forward": lambda self, x: AXES[name](x)})()
    model = nn.Sequential(lip.BoundedInput(1.0), lip.AddBias(6), module)
    require_contained(model, (6,))


# ---- forwards that look at how they are run -----------------------------------------------------


class Switching(nn.Module):
    """Honest while nobody looks: `seen(self, x)` says whether this is the occasion to be loud."""

    def __init__(self, seen):
        super().__init__()
        self.inner, self.seen, self.calls = lip.SpectralLinear(6, 6), seen, 0

    def forward(self, x):
        self.calls += 1
        y = self.inner(x)
        return LOUD * y if self.seen(self, x) else y


def by_exception(self, x):
    try:
        return len(x) not in (0, 2)
    except Exception:
        return False


def quiet_for_proxies(self, x):
    return isinstance(x, torch.Tensor) and len(x) not in (0, 2)


STATE = {"loud": False}
OCCASIONS = {
    "len": lambda self, x: len(x) != 2,
    "shape": lambda self, x: x.shape[0] != 2,
    "size": lambda self, x: x.size(0) > 2,
    "exception": by_exception,
    "type": quiet_for_proxies,
    "proxy": lambda self, x: not isinstance(x, fx.Proxy) and len(x) != 2,
    "tracing": lambda self, x: (
        not torch.fx._symbolic_trace.is_fx_symbolic_tracing() and len(x) != 2
    ),
    "compiling": lambda self, x: (
        not torch.compiler.is_compiling() and not isinstance(x, fx.Proxy) and len(x) != 2
    ),
    "counter": lambda self, x: self.calls > 3,
    "global state": lambda self, x: STATE["loud"],
    "mode": lambda self, x: not self.inner.training,
}


@pytest.mark.parametrize("name", OCCASIONS)
def test_a_forward_that_looks_around(name):
    STATE["loud"] = False
    model = nn.Sequential(
        lip.BoundedInput(1.0, sphere=True), lip.SpectralLinear(6, 6), Switching(OCCASIONS[name]),
        lip.SpectralLinear(6, 3),
    )  # fmt: skip
    query = tacit.Clipless(gradient_clip=0.01)
    require_contained(model, (6,), query)
    STATE["loud"] = True
    model[2].inner.training = False
    require_contained(model, (6,), query)


class LoudSequence(nn.Sequential):
    def forward(self, x):
        for module in self:
            x = module(x)
        return LOUD * x if by_exception(self, x) else x


class LoudIteration(nn.Sequential):
    """Its forward is PyTorch's, and goes through what __iter__ gives."""

    rounds = 0

    def __iter__(self):
        self.rounds += 1
        times = 1 if self.rounds < 3 else 9
        return iter([m for m in self._modules.values() for _ in range(times)])


@pytest.mark.parametrize("kind", [LoudSequence, LoudIteration], ids=lambda kind: kind.__name__)
def test_a_sequence_that_is_none(kind):
    block = kind(lip.SpectralLinear(6, 6, max_norm=3.0), lip.MaxMin())
    model = nn.Sequential(lip.BoundedInput(1.0), lip.AddBias(6), block, lip.SpectralLinear(6, 3))
    require_contained(model, (6,))


class HidesItsParts(nn.Module):
    """Its own tables say that there is nothing to keep in a set."""

    def __init__(self):
        super().__init__()
        self.inner = lip.SpectralLinear(6, 6)
        self.hiding = False

    def modules(self):
        return iter([self]) if self.hiding else super().modules()

    def forward(self, x):
        return self.inner(x)


def test_weights_are_kept_in_the_sets_of_the_layers_that_run():
    hides = HidesItsParts()
    model = nn.Sequential(lip.BoundedInput(1.0), lip.AddBias(6), hides, lip.SpectralLinear(6, 3))
    model.modules = lambda: iter([])
    query = tacit.Clipless(gradient_clip=0.01)
    with contextlib.suppress(UnboundedLayer):
        query(model, CrossEntropy(), batch((6,), 1))
    del model.modules
    query(model, CrossEntropy(), batch((6,), 1))
    hides.hiding = True
    model.__class__ = type("Root", (nn.Sequential,), {"modules": lambda self: iter([])})
    with torch.no_grad():
        hides.inner.weight *= LOUD
    require_contained(model, (6,), query)


class Repeats(nn.ModuleList):
    def __iter__(self):
        return iter([module for module in super().__iter__() for _ in range(9)])


def test_a_list_of_branches_that_is_none():
    layer = lip.Sum([lip.MaxMin(), lip.Absolute()])
    model = network(layer, (6,))
    layer.branches = Repeats(layer.branches)
    with pytest.raises(UnboundedLayer, match="branches"):
        worst(model, (6,))


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_hook_that_says_it_is_ours(everywhere):
    """Hooks of the library are let through, since they only look; no hook takes part in a step."""

    def hook(module, args, found):
        return LOUD * found

    hook.__module__ = "tacit.looking"
    layer = lip.Sum([lip.MaxMin(), lip.Absolute()])
    model = network(layer, (6,))
    register = nn.modules.module.register_module_forward_hook
    handle = register(hook) if everywhere else layer.register_forward_hook(hook)
    try:
        assert worst(model, (6,)) <= 1 + 1e-5
    finally:
        handle.remove()


# ---- what is changed between two steps ----------------------------------------------------------


def test_the_code_of_a_class_is_replaced_between_two_steps(monkeypatch):
    shift = lip.Shift((3, 3))
    conv = lip.SpectralConv2d(4, 4, 3, padding=1)
    model = network(nn.Sequential(shift, conv, lip.MaxMin(), nn.ReLU()), IMAGE)
    query = tacit.Clipless(gradient_clip=0.01)
    assert worst(model, IMAGE, query) <= 1
    originals = [
        (lip.Shift, "_move"),
        (lip.Shift, "forward"),
        (nn.Conv2d, "_conv_forward"),
        (nn.Conv2d, "forward"),
        (lip.SpectralConv2d, "_conv_forward"),
        (nn.ReLU, "forward"),
        (F, "relu"),
        (F, "conv2d"),
    ]
    for owner, name in originals:
        original = getattr(owner, name)

        def evil(*args, original=original, **kwargs):
            return LOUD * original(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, evil)
            with pytest.raises(UnboundedLayer, match=f"{name} was replaced after"):
                worst(model, IMAGE, query)
            with pytest.raises(UnboundedLayer, match=f"{name} was replaced after"):
                worst(model, IMAGE)
        assert worst(model, IMAGE, query) <= 1
    order = sorting.order
    with monkeypatch.context() as patch:
        patch.setattr(sorting, "order", lambda a, b: tuple(LOUD * x for x in order(a, b)))
        with pytest.raises(UnboundedLayer, match=r"activations\.order was replaced"):
            worst(model, IMAGE, query)
    backward = sorting._Order.backward
    with monkeypatch.context() as patch:
        loud = staticmethod(lambda *args: tuple(LOUD * x for x in backward(*args)))
        patch.setattr(sorting._Order, "backward", loud)
        for again in (query, None):
            with pytest.raises(UnboundedLayer, match="backward was replaced after"):
                worst(model, IMAGE, again)
    assert worst(model, IMAGE, query) <= 1


def test_a_child_is_swapped_between_two_steps():
    model = network(lip.SpectralLinear(6, 6), (6,))
    query = tacit.Clipless(gradient_clip=0.01)
    before = query(model, CrossEntropy(), batch((6,), 1)).blocks[0].bound
    model[2] = lip.SpectralLinear(6, 6, max_norm=LOUD)
    assert worst(model, (6,), query) <= 1 + 1e-5
    after = query(model, CrossEntropy(), batch((6,), 1)).blocks[0].bound
    assert after == pytest.approx(LOUD * before, rel=1e-3)
    model._modules["2"] = nn.Linear(6, 6)
    with pytest.raises(UnboundedLayer, match="SpectralLinear"):
        worst(model, (6,), query)
    model._modules["2"] = F.relu
    with pytest.raises(UnboundedLayer, match="no module"):
        worst(model, (6,), query)
    model._modules["2"] = model
    with pytest.raises(UnboundedLayer, match="contains itself"):
        worst(model, (6,), query)


class Table(dict):
    """A table of children that has others each time it is read."""

    reads = 0

    def items(self):
        Table.reads += 1
        return super().items() if Table.reads % 2 else {**self, "2": lip.Scale(LOUD)}.items()

    def values(self):
        return dict(self.items()).values()


def test_a_table_of_children_that_changes():
    model = network(lip.SpectralLinear(6, 6), (6,))
    model.__dict__["_modules"] = Table(model._modules)
    with contextlib.suppress(ValueError):  # the names of its parameters change as well
        require_contained(model, (6,))


class LoudParameter(nn.Parameter):
    @classmethod
    def __torch_function__(cls, function, kinds, args=(), kwargs=None):
        found = super().__torch_function__(function, kinds, args, kwargs or {})
        return LOUD * found if function is F.linear else found


def as_tensor(layer):
    weight = layer.weight.detach() * LOUD
    del layer.weight
    layer.weight = weight


def as_other_parameter(layer):
    layer.weight = LoudParameter(layer.weight.detach())


def parametrized(layer):
    class Louder(nn.Module):
        def forward(self, weight):
            return LOUD * weight

    parametrize.register_parametrization(layer, "weight", Louder())


def by_data(layer):
    layer.weight.data *= LOUD


def missing(layer):
    del layer.weight


@pytest.mark.parametrize(
    "change",
    [as_tensor, as_other_parameter, parametrized, by_data, missing],
    ids=lambda change: change.__name__,
)
def test_a_weight_that_is_no_parameter_of_its_set(change):
    layer = lip.SpectralLinear(6, 6)
    model = network(layer, (6,))
    query = tacit.Clipless(gradient_clip=0.01)
    assert worst(model, (6,), query) <= 1 + 1e-5
    change(layer)
    require_contained(model, (6,), query)
    require_contained(model, (6,))


@pytest.mark.parametrize(
    ("make", "shape", "name", "size"),
    [
        (lambda: lip.AddBias(4), IMAGE, "bias", (1,)),
        (lambda: lip.SpectralLinear(6, 6, bias=True), (6,), "bias", (1,)),
        (lambda: lip.SpectralLinear(6, 6, bias=True), (6,), "bias", (1, 1)),
        (lambda: lip.ConvexResidual(lip.Absolute()), IMAGE, "mixture.lean", (4,)),
    ],
)
def test_a_parameter_of_another_shape_is_refused(make, shape, name, size):
    """One bias for all features has a gradient that is longer by the root of their number."""
    layer = make()
    model, query = network(layer, shape), tacit.Clipless(gradient_clip=0.01)
    assert worst(model, shape, query) <= 1 + 1e-5
    holder, _, last = name.rpartition(".")
    setattr(layer.get_submodule(holder), last, nn.Parameter(torch.zeros(size)))
    for again in (query, None):
        with pytest.raises(UnboundedLayer, match=r"the bias|its bias|its lean"):
            worst(model, shape, again)


# ---- certificates -------------------------------------------------------------------------------


def test_a_certificate_is_for_the_program():
    torch.manual_seed(0)
    block = Switching(lambda self, x: False)
    model = nn.Sequential(
        lip.BoundedInput(1.0), block, lip.SpectralLinear(6, 3), lip.Scale(1.0)
    ).double()
    x = torch.randn(5, 6, dtype=torch.float64)
    honest = certified_radius(model, x)
    block.seen = quiet_for_proxies
    torch.testing.assert_close(certified_radius(model, x), honest)
    shift = nn.Sequential(lip.Shift((3, 3)), nn.Flatten(), lip.SpectralLinear(64, 3)).double()
    shift[0]._move = lambda run, by: LOUD * run
    with pytest.raises(UnboundedLayer, match="no certificate"):
        certified_radius(shift, torch.randn(2, 4, 4, 4))
    shift[0] = type("Evil", (lip.Shift,), {"_move": lambda self, run, by: LOUD * run})((3, 3))
    with pytest.raises(UnboundedLayer, match=r"no certificate.*Evil has a _move of its own"):
        certified_radius(shift, torch.randn(2, 4, 4, 4))
