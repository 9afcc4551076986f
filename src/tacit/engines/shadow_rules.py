"""How labels pass through an operator: the registry, and the rules of general tensor operators.

A rule takes a `Call` and returns the labels of the operator's outputs: one tensor that broadcasts
to each output, or a list with one entry per output (0 for a public one). It must be sound: an
output element that can change when record i changes has label i or -1. An operator without a rule,
and a rule that raises, give -1 everywhere; so a rule may be strict about what it understands.

In-place variants (`add_`) and `out=` variants share the rule of the functional operator.

The other rules are in `shadow_rules_matrix`, `shadow_rules_index`, `shadow_rules_nn` and
`shadow_rules_losses`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tacit.engines.shadow_labels import combine, public_labels, reduce_labels

Labels: TypeAlias = "Tensor | int | Sequence[Tensor | int | None]"
Rule: TypeAlias = "Callable[[Call], Labels]"


class Call:
    """One call of an operator: its arguments by name, its outputs, and the labels of each.

    A rule sets `selects` where private values decide what is read or written, or how much, and
    `reorders` where public ones decide whose row is read or written, so that it may be another's
    next time. `in_order(index)` tells whether an index counts 0, 1, 2 … whatever was drawn.
    """

    def __init__(
        self,
        name: str,
        func: Any,
        arguments: dict[str, Any],
        outputs: list[Tensor | None],
        find: Callable[[Tensor], Tensor | None],
        write: Callable[[Tensor, Tensor | int], None],
        read_names: Sequence[str],
        *,
        backward: bool = False,
        in_order: Callable[[Tensor], bool] = lambda index: False,
    ) -> None:
        self.name = name
        self.func = func
        self.arguments = arguments
        self.outputs = outputs
        self.write = write
        self.selects = False
        self.reorders = False
        self.backward = backward
        self.in_order = in_order
        self._find = find
        self.read_names = read_names
        shaped = [tensor for tensor in outputs if tensor is not None] or self.reads()
        self.device = shaped[0].device

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        value = self.arguments.get(name)
        return default if value is None else value

    def reads(self) -> list[Tensor]:
        """All tensors that the operator reads, in the order of its arguments."""
        found: list[Tensor] = []
        for name in self.read_names:
            value = self.arguments[name]
            items = value if isinstance(value, (list, tuple)) else (value,)
            found += [item for item in items if isinstance(item, Tensor)]
        return found

    def private(self, tensor: Tensor | None) -> bool:
        """Whether a tensor may be private."""
        return tensor is not None and self._find(tensor) is not None

    def labels(self, tensor: Tensor) -> Tensor:
        """Labels of a tensor, on the device of the outputs."""
        found = self._find(tensor)
        if found is None:
            return public_labels(tensor.shape, self.device)
        return found.to(self.device)

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


RULES: dict[str, Rule] = {}


def label_rule(*operators: str) -> Callable[[Rule], Rule]:
    """Register a rule: `@label_rule("mm")`, or with its namespace for an operator outside ATen."""

    def register(rule: Rule) -> Rule:
        for name in operators:
            RULES[name] = rule
        return rule

    return register


def names(text: str) -> frozenset[str]:
    """Operator names from one string."""
    return frozenset(text.split())


def register(rule: Rule, operators: str) -> None:
    """Give one rule to several operators, written as one string."""
    for name in names(operators):
        RULES[name] = rule


# --- operators without arithmetic -------------------------------------------------------------

#: The first argument is overwritten, so what it held does not matter.
OVERWRITES = names(
    "copy copy_ zero zero_ fill fill_ normal_ uniform uniform_ random random_ exponential "
    "exponential_ geometric geometric_ cauchy cauchy_ log_normal log_normal_ normal_functional "
    "_foreach_copy _foreach_copy_ _foreach_zero _foreach_zero_ bernoulli_ _philox_normal_ "
    "_philox_uniform_"
)
#: Operators that read sizes and flags of a tensor, and never a value.
METADATA = names(
    "is_same_size record_stream sym_size sym_stride sym_numel sym_storage_offset size stride "
    "is_pinned is_set_to is_contiguous is_strides_like_format is_non_overlapping_and_dense "
    "_fused_sdp_choice _use_cudnn_ctc_loss cudnn_is_acceptable dim sym_is_contiguous "
    "_assert_tensor_metadata _has_same_storage_numel dense_dim sparse_dim qscheme"
)
#: Operators that change what a tensor refers to, or alias their input: labels follow the storage.
ALIASES = names("_unsafe_view _reshape_alias lift lift_fresh detach alias _resize_output_")
#: Operators that raise an error for some values, which a program may catch and go another way.
MAY_RAISE = names("_linalg_check_errors")
#: Operators that hand a value to Python or to the shape of their output.
LOOKS = names(
    "_local_scalar_dense item is_nonzero equal allclose _is_all_true _is_any_true _assert_async "
    "_functional_assert_async _unique _unique2 unique_dim unique_consecutive "
    "unique_dim_consecutive bincount repeat_interleave"
)


def public(call: Call) -> Labels:
    """New memory with the shape of another tensor, or random draws."""
    return 0


register(
    public,
    "zeros_like ones_like empty_like rand_like randn_like randint_like full_like new_zeros "
    "new_empty new_ones new_full new_empty_strided zero uniform random exponential geometric "
    "cauchy log_normal normal_functional _efficientzerotensor _new_zeros_with_same_feature_meta "
    "_foreach_zero _philox_normal _philox_uniform _cudnn_init_dropout_state",
)


def elementwise(call: Call) -> Labels:
    """Output element k depends on element k of each operand, after broadcasting."""
    return combine(*call.all())


register(
    elementwise,
    "clone _to_copy copy fill lift_fresh_copy contiguous _copy_from _lazy_clone _conj_physical "
    "floor_divide masked_fill where nan_to_num _prelu_kernel _prelu_kernel_backward _masked_scale "
    "native_dropout_backward rrelu_with_noise_backward threshold_backward gelu_backward "
    "silu_backward elu_backward hardswish hardswish_backward hardsigmoid_backward "
    "hardtanh_backward leaky_relu_backward sigmoid_backward tanh_backward softplus_backward "
    "softshrink_backward hardshrink_backward mish_backward logit_backward log_sigmoid_backward "
    "_standard_gamma_grad normal isnan isinf polar complex "
    "_pin_memory dequantize _add_relu __lshift__ __rshift__ __ilshift__ __irshift__ "
    "fake_quantize_per_tensor_affine_cachemask log_sigmoid_forward "
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
)


@label_rule("bernoulli")
def _bernoulli(call: Call) -> Labels:
    if "p" in call.arguments:
        # The tensor only gives the shape.
        probability = call.of("p")
        return 0 if probability is None else probability
    return call.need("self")


@label_rule("poisson", "binomial", "_standard_gamma")
def _sampler(call: Call) -> Labels:
    # How many numbers are drawn depends on the data, and the generator is shared: with the same
    # seed, one record shifts what the others draw.
    call.selects = True
    return combine(*call.all())


@label_rule("rrelu_with_noise")
def _rrelu(call: Call) -> Labels:
    labels = call.need("self")
    call.selects = bool(call["training"])
    call.write(call["noise"], labels)
    return labels


@label_rule("native_dropout", "_fused_dropout")
def _dropout(call: Call) -> Labels:
    return [call.labels(call.reads()[0]), 0]


@label_rule("_foreach_norm", "_foreach_max", "_foreach_powsum")
def _foreach_reduce(call: Call) -> Labels:
    return [reduce_labels(call.labels(tensor)) for tensor in call["self"]]


def foreach(call: Call) -> Labels:
    """Tensor k of the output depends on tensor k of each list, and on single tensors."""
    values = [call[name] for name in call.read_names]
    lists = [v for v in values if isinstance(v, (list, tuple)) and v and isinstance(v[0], Tensor)]
    single = [reduce_labels(call.labels(t)) for t in values if isinstance(t, Tensor)]
    result: list[Tensor | int | None] = []
    for group in zip(*lists, strict=True):
        result.append(combine(*[call.labels(tensor) for tensor in group], *single))
    return result


# --- moving elements around ------------------------------------------------------------------


def _on_labels(call: Call, convert: torch.dtype | None = None) -> list[Tensor]:
    def swap(value: Any) -> Any:
        if isinstance(value, Tensor):
            labels = call.labels(value)
            labels = labels.clone() if call.func._schema.is_mutable else labels
            return labels if convert is None else labels.to(convert)
        if isinstance(value, (list, tuple)):
            return type(value)(swap(item) for item in value)
        return value

    positional, named = [], {}
    for argument in call.func._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write and argument.kwarg_only:
            continue  # out=
        if argument.kwarg_only:
            named[argument.name] = swap(call[argument.name])
        else:
            positional.append(swap(call[argument.name]))
    moved = call.func.overloadpacket(*positional, **named)
    moved = list(moved) if isinstance(moved, (list, tuple)) else [moved]
    return moved if convert is None else [labels.to(torch.int32) for labels in moved]


def move(call: Call) -> Labels:
    """The operator moves elements and fills with zeros: run it on the labels."""
    return _on_labels(call)


register(
    move,
    "stack _stack roll flip repeat tril triu rot90 pixel_shuffle pixel_unshuffle channel_shuffle "
    "native_channel_shuffle block_diag diag_embed slice_backward select_backward "
    "diagonal_backward select_scatter slice_scatter diagonal_scatter as_strided_scatter "
    "unsafe_split unsafe_split_with_sizes split_with_sizes_copy split_copy unbind_copy "
    "narrow_copy view_copy _reshape_copy _reshape_alias_copy expand_copy permute_copy "
    "transpose_copy t_copy select_copy slice_copy squeeze_copy unsqueeze_copy unfold_copy "
    "diagonal_copy as_strided_copy alias_copy detach_copy _chunk_cat",
)


@label_rule("reflection_pad1d", "reflection_pad2d", "reflection_pad3d")
def _move_as_numbers(call: Call) -> Labels:
    # Some padding kernels exist for floating-point numbers only; float64 holds labels exactly.
    return _on_labels(call, torch.float64)


register(_move_as_numbers, "replication_pad1d replication_pad2d replication_pad3d")


@label_rule("cat")
def _cat(call: Call) -> Labels:
    return torch.cat([call.labels(tensor) for tensor in call["tensors"]], call["dim"])


@label_rule("constant_pad_nd")
def _pad(call: Call) -> Labels:
    return torch.constant_pad_nd(call.need("self"), call["pad"], 0)


@label_rule("_unsafe_view", "_conj_copy", "_neg_view_copy", "view_as_real_copy")
def _reshape(call: Call) -> Labels:
    labels = call.need("self")
    if labels.numel() != call.output.numel():
        labels = labels.unsqueeze(-1).expand(call.output.shape)
    return labels.reshape(call.output.shape)


@label_rule("unfold_backward")
def _unfold_backward(call: Call) -> Labels:
    grad = reduce_labels(call.need("grad_in"), -1)
    return reduce_labels(grad, call["dim"], keepdim=True) if grad.dim() else grad


@label_rule("fill_diagonal")
def _fill_diagonal(call: Call) -> Labels:
    return call.need("self")


# --- reductions and operators along a dimension -------------------------------------------------


def reduction(call: Call) -> Labels:
    """Each output depends on all elements along the reduced dimensions."""
    if "other" in call.arguments and call.name in ("max", "min"):
        return combine(*call.all())
    dims = call.get("dim")
    if isinstance(dims, (list, tuple)) and len(dims) == 0:
        dims = None
    reduced = reduce_labels(combine(*call.all()), dims, bool(call.get("keepdim", False)))
    if reduced.shape != call.output.shape:
        raise ValueError("an unexpected shape")
    return reduced


register(
    reduction,
    "sum nansum mean amax amin aminmax var var_mean std std_mean prod any all argmax argmin max "
    "min median nanmedian mode kthvalue logsumexp linalg_vector_norm linalg__powsum norm "
    "count_nonzero dist dot vdot hash_tensor",
)


@label_rule("histc", "histogram", "_aminmax", "trace", "bincount", "native_norm")
def whole(call: Call) -> Labels:
    """Everything depends on everything."""
    return call.whole()


register(
    whole, "_unique _unique2 unique_dim unique_consecutive unique_dim_consecutive _pdist_forward"
)
register(whole, "_pdist_backward isin segment_reduce _segment_reduce_backward")


def along(call: Call) -> Labels:
    """Each output depends on all elements along one dimension; that dimension stays."""
    labels = combine(*call.all())
    dim = call.get("dim", -1)
    if labels.dim() == 0:
        return labels
    return reduce_labels(labels, dim, keepdim=True)


register(
    along,
    "_softmax _log_softmax softmax log_softmax _safe_softmax _softmax_backward_data "
    "_log_softmax_backward_data cumsum cumprod cummax cummin logcumsumexp _logcumsumexp sort "
    "argsort topk multinomial linalg_cross _fft_c2c _fft_c2r _fft_r2c _sample_dirichlet "
    "_cummax_helper _cummin_helper",
)


@label_rule("_dirichlet_grad")
def _dirichlet_grad(call: Call) -> Labels:
    return reduce_labels(combine(*call.all()), -1, keepdim=True)


@label_rule("renorm")
def _renorm(call: Call) -> Labels:
    labels = call.need("self")
    kept = call["dim"] % labels.dim()
    return reduce_labels(labels, [k for k in range(labels.dim()) if k != kept], keepdim=True)


@label_rule("glu")
def _glu(call: Call) -> Labels:
    return combine(*call.need("self").chunk(2, call["dim"]))


@label_rule("glu_backward")
def _glu_backward(call: Call) -> Labels:
    dim = call["dim"]
    half = combine(call.need("grad_output"), *call.need("self").chunk(2, dim))
    return torch.cat([half, half], dim)


@label_rule("searchsorted", "bucketize")
def _search(call: Call) -> Labels:
    if call.name == "bucketize":
        values, borders = call.of("self"), call.need("boundaries")
    else:
        values, borders = call.of("self"), call.need("sorted_sequence")
        borders = combine(borders, call.of("sorter"))
    borders = reduce_labels(borders, -1, keepdim=borders.dim() > 1)
    return combine(values, borders).expand(call.output.shape)
