"""One call of an operator, as the rules of shadow memory see it, and the registry of rules.

A rule takes a `Call` and returns the labels of the operator's outputs: one tensor that broadcasts
to each output, or a list with one entry per output (0 for a public one). It must be sound: an
output element that can change when record i changes has label i or -1. An operator without a rule,
and a rule that raises, give -1 everywhere; so a rule may be strict about what it understands.
In-place variants (`add_`) and `out=` variants share the rule of the functional operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from tacit.engines.shadow_labels import combine, public_labels, reduce_labels
from tacit.torch_internals import schema_of, written_operands

Labels: TypeAlias = "Tensor | int | Sequence[Tensor | int | None]"
Rule: TypeAlias = "Callable[[Call], Labels]"

RULES: dict[str, Rule] = {}


def label_rule(*operators: str) -> Callable[[Rule], Rule]:
    """Register a rule: `@label_rule("mm")`, or with its namespace for an operator outside ATen."""

    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(operators, rule))
        return rule

    return register


def names(text: str) -> frozenset[str]:
    """Operator names from one string."""
    return frozenset(text.split())


def flat(values: Any) -> Iterator[Any]:
    """The leaves of nested lists and tuples, in order."""
    if isinstance(values, (list, tuple)):
        for value in values:
            yield from flat(value)
    else:
        yield values


#: The first argument is overwritten, so what it held does not matter.
_OVERWRITES = names(
    "copy copy_ zero zero_ fill fill_ normal_ uniform uniform_ random random_ exponential "
    "exponential_ geometric geometric_ cauchy cauchy_ log_normal log_normal_ normal_functional "
    "bernoulli_ _philox_normal_ _philox_uniform_"
)
#: Operators that read sizes and flags of a tensor, and never a value.
_METADATA = names(
    "is_same_size record_stream sym_size sym_stride sym_numel sym_storage_offset size stride "
    "is_pinned is_set_to is_contiguous is_strides_like_format is_non_overlapping_and_dense "
    "_fused_sdp_choice cudnn_is_acceptable dim sym_is_contiguous "
    "_assert_tensor_metadata _has_same_storage_numel dense_dim sparse_dim qscheme"
)
#: They choose a kernel by sizes and flags; by lengths too where targets are joined to one row.
_CTC_KERNELS = names("_use_cudnn_ctc_loss _use_miopen_ctc_loss")
#: Operators that change what a tensor refers to, or alias their input: labels follow the storage.
ALIASES = names("_unsafe_view _reshape_alias lift lift_fresh detach alias _resize_output")
#: Operators that hand a value to Python or to the shape of their output.
VALUE_READS = names(
    "_local_scalar_dense item is_nonzero equal allclose _is_all_true _is_any_true _assert_async "
    "_functional_assert_async _unique _unique2 unique_dim unique_consecutive "
    "unique_dim_consecutive bincount repeat_interleave"
)


def reads_no_value(call: Call) -> bool:
    """Whether an operator reads only sizes and flags of its operands."""
    if call.name in _CTC_KERNELS:
        lengths = [call["input_lengths"], call["target_lengths"]]
        return call["targets"].dim() > 1 or not any(isinstance(x, Tensor) for x in lengths)
    return call.name in _METADATA


class Call:
    """One call of an operator: its arguments by name, its outputs, and the labels of each.

    A rule sets `selects` where private values decide what is read or written, or how much, and
    `reorders` where public ones decide whose row is read or written, so that it may be another's
    next time. `in_order(index)` tells whether an index counts 0, 1, 2 … whatever was drawn.
    """

    def __init__(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        output: Any,
        find: Callable[[Tensor], Tensor | None],
    ) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.name, parameters = describe(func)
        self.arguments: dict[str, Any] = {}
        self.read_names: list[str] = []
        self.mutated = written_operands(func, args, kwargs)
        for position, parameter in enumerate(parameters):
            if position < len(args) and not parameter.by_name:
                value = args[position]
            else:
                value = kwargs.get(parameter.name, parameter.default)
            self.arguments[parameter.name] = value
            if parameter.is_read:
                self.read_names.append(parameter.name)
        found = [leaf if isinstance(leaf, Tensor) else None for leaf in flat(output)]
        self.outputs = found if any(t is not None for t in found) else [*self.mutated]
        self.device = next((t.device for t in self.outputs if t is not None), None)
        self.written: dict[int, tuple[Tensor, Tensor | int]] = {}
        self.selects = self.reorders = self.backward = False
        self.in_order: Callable[[Tensor], bool] = lambda index: False
        self._find = find
        self._found: dict[int, tuple[Tensor, Tensor | None]] = {}

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        value = self.arguments.get(name)
        return default if value is None else value

    def write(self, tensor: Tensor, labels: Tensor | int) -> None:
        """Set the labels of a tensor that is written to and not returned."""
        self.written[id(tensor)] = (tensor, labels)

    def reads(self) -> list[Tensor]:
        """All tensors that the operator reads, in the order of its arguments."""
        values = [self.arguments[name] for name in self.read_names]
        return [item for value in values for item in flat(value) if isinstance(item, Tensor)]

    def find(self, tensor: Tensor) -> Tensor | None:
        """Labels of a tensor, on the device of the outputs, or None if its memory is public."""
        if id(tensor) not in self._found:
            found = self._find(tensor)
            # The tensor is kept too: an id is another's once its tensor is gone.
            self._found[id(tensor)] = (tensor, None if found is None else found.to(self.device))
        return self._found[id(tensor)][1]

    def private(self, tensor: Tensor | None) -> bool:
        """Whether a tensor may be private."""
        return tensor is not None and self.find(tensor) is not None

    def labels(self, tensor: Tensor) -> Tensor:
        """Labels of a tensor, on the device of the outputs."""
        found = self.find(tensor)
        return public_labels(tensor.shape, self.device) if found is None else found

    def of(self, name: str) -> Tensor | None:
        """Labels of an argument, or None where it was not given."""
        value = self.arguments.get(name)
        return self.labels(value) if isinstance(value, Tensor) else None

    def need(self, name: str) -> Tensor:
        """Labels of an argument that must be a tensor."""
        return self.labels(self.arguments[name])

    def all(self) -> list[Tensor]:
        return [self.labels(tensor) for tensor in self.reads()]

    def whole(self) -> Tensor:
        """One label for everything that the operator reads."""
        return combine(*[reduce_labels(labels) for labels in self.all()])

    @property
    def output(self) -> Tensor:
        first = self.outputs[0]
        assert first is not None
        return first


class Parameter(NamedTuple):
    """What the schema of an operator says about one argument."""

    name: str
    default: Any
    by_name: bool
    is_tensor: bool
    is_read: bool


@cache
def describe(func: Any) -> tuple[str, tuple[Parameter, ...]]:
    """The name of an operator without its namespace and underscore, and its parameters."""
    name = schema_of(func).name.removeprefix("aten::")
    parameters = []
    for position, argument in enumerate(schema_of(func).arguments):
        is_out = argument.kwarg_only and argument.alias_info and argument.alias_info.is_write
        is_read = not is_out and not (name in _OVERWRITES and position == 0)
        tensor = "Tensor" in str(argument.type)
        default, by_name = argument.default_value, argument.kwarg_only
        parameters.append(Parameter(argument.name, default, by_name, tensor, is_read))
    return name if name.endswith("__") else name.removesuffix("_"), tuple(parameters)
