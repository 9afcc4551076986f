"""Rules of the layers of networks: convolution, normalisation, pooling, attention, recurrence.

Each rule says which input elements an output element can depend on, at the precision that models
need: a convolution keeps records and groups apart, pooling keeps everything but the pixels apart,
attention keeps records and heads apart.
"""

from __future__ import annotations

import re

from torch import Tensor

from tacit.engines.shadow_labels import combine, count, fit_labels, reduce_labels
from tacit.engines.shadow_rules import Call, Labels, label_rule, register


def _spread(labels: Tensor, dims: int) -> Tensor:
    """Add trailing dimensions of size 1 until there are `dims`."""
    return labels.reshape(*labels.shape, *[1] * (dims - labels.dim()))


def _channels(labels: Tensor, dims: int) -> Tensor:
    """A label per channel, shaped to broadcast over (records, channels, ...)."""
    return labels.reshape(1, -1, *[1] * (dims - 2))


# --- convolution ------------------------------------------------------------------------------


def _per_group(labels: Tensor, groups: int) -> Tensor:
    """(records, channels, ...) to (records, groups)."""
    inner = count(labels.shape[1:]) // groups
    return reduce_labels(labels.reshape(labels.shape[0], groups, inner), -1)


def _weight_groups(labels: Tensor, groups: int) -> Tensor:
    return reduce_labels(labels.reshape(groups, labels.numel() // groups), -1)


@label_rule("convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution")
def _convolution(call: Call) -> Labels:
    groups, output = call["groups"], call.output
    inputs = call.labels(call.reads()[0])
    joined = combine(_per_group(inputs, groups), _weight_groups(call.need("weight"), groups))
    joined = joined.repeat_interleave(output.shape[1] // groups, dim=1)
    return _spread(combine(joined, call.of("bias")), output.dim())


@label_rule("convolution_backward")
def _convolution_backward(call: Call) -> Labels:
    groups = call["groups"]
    grad_labels, weight = call.need("grad_output"), call["weight"]
    grad = _per_group(grad_labels, groups)
    inputs = _per_group(call.need("input"), groups)
    to_input = combine(grad, _weight_groups(call.need("weight"), groups))
    to_input = to_input.repeat_interleave(call["input"].shape[1] // groups, dim=1)
    to_weight = reduce_labels(combine(grad, inputs), 0)
    to_weight = to_weight.repeat_interleave(weight.shape[0] // groups)
    to_bias = reduce_labels(grad_labels, [k for k in range(grad_labels.dim()) if k != 1])
    dims = grad_labels.dim()
    return [_spread(to_input, dims), _spread(to_weight, weight.dim()), to_bias]


@label_rule("im2col", "col2im")
def _columns(call: Call) -> Labels:
    labels = call.need("self")
    batched = labels.dim() == (4 if call.name == "im2col" else 3)
    joined = reduce_labels(labels, range(1, labels.dim()) if batched else None)
    return _spread(joined, call.output.dim()) if batched else joined


# --- normalisation ----------------------------------------------------------------------------


@label_rule("native_layer_norm", "_fused_rms_norm")
def _layer_norm(call: Call) -> Labels:
    labels = call.need("input")
    dims = range(labels.dim() - len(call["normalized_shape"]), labels.dim())
    row = reduce_labels(labels, dims, keepdim=True)
    return [combine(row, call.of("weight"), call.of("bias")), row, row][: len(call.outputs)]


@label_rule("native_layer_norm_backward", "_fused_rms_norm_backward")
def _layer_norm_backward(call: Call) -> Labels:
    inputs, grad = call.need("input"), call.need("grad_out")
    lead = inputs.dim() - len(call["normalized_shape"])
    dims = range(lead, inputs.dim())
    statistics = [call.of("mean"), call.of("rstd")]
    element = combine(grad, inputs, *statistics)
    weight = call.of("weight")
    row = combine(element, *([] if weight is None else [weight]))
    row = reduce_labels(row, dims, keepdim=True)
    per_weight = reduce_labels(combine(grad, reduce_labels(element, dims, True)), range(lead))
    if lead == 0:
        per_weight = combine(grad, reduce_labels(element))
    return [row, per_weight, per_weight][: len(call.outputs)]


@label_rule("native_group_norm")
def _group_norm(call: Call) -> Labels:
    labels, groups = call.need("input"), call["group"]
    row = _per_group(labels, groups)
    spread = row.repeat_interleave(labels.shape[1] // groups, dim=1)
    affine = [
        _channels(x, labels.dim()) for x in (call.of("weight"), call.of("bias")) if x is not None
    ]
    return [combine(_spread(spread, labels.dim()), *affine), row, row]


@label_rule("native_group_norm_backward")
def _group_norm_backward(call: Call) -> Labels:
    inputs, grad, groups = call.need("input"), call.need("grad_out"), call["group"]
    per_channel = inputs.shape[1] // groups
    row = combine(_per_group(inputs, groups), _per_group(grad, groups))
    row = combine(row, call.of("mean"), call.of("rstd"))
    weight = call.of("weight")
    to_input = row if weight is None else combine(row, _weight_groups(weight, groups))
    to_weight = reduce_labels(row, 0).repeat_interleave(per_channel)
    to_input = to_input.repeat_interleave(per_channel, dim=1)
    return [_spread(to_input, inputs.dim()), to_weight, to_weight]


@label_rule(
    "native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "miopen_batch_norm"
)
def _batch_norm(call: Call) -> Labels:
    labels = call.need("input")
    dims = labels.dim()
    affine = [_channels(x, dims) for x in (call.of("weight"), call.of("bias")) if x is not None]
    running = [call.get("running_mean"), call.get("running_var")]
    if not call["training"]:
        affine += [_channels(call.labels(x), dims) for x in running if x is not None]
        return [combine(labels, *affine), *[0] * (len(call.outputs) - 1)]
    statistics = reduce_labels(labels, [k for k in range(dims) if k != 1])
    for tensor in running:
        if tensor is not None:
            call.write(tensor, combine(call.labels(tensor), statistics))
    output = combine(_channels(statistics, dims), *affine)
    # A fourth output is scratch memory that only this operator's backward reads.
    rest = [0] * (len(call.outputs) - 3)
    return [output, statistics, statistics, *rest]


@label_rule("_batch_norm_with_update", "_batch_norm_no_update")
def _batch_norm_update(call: Call) -> Labels:
    # Without running statistics the second one uses those of the batch too.
    call.arguments["training"] = True
    return _batch_norm(call)


@label_rule("_native_batch_norm_legit_no_training")
def _batch_norm_eval(call: Call) -> Labels:
    call.arguments["training"] = False
    return _batch_norm(call)


@label_rule("native_batch_norm_backward", "cudnn_batch_norm_backward", "batch_norm_backward")
def _batch_norm_backward(call: Call) -> Labels:
    inputs = call.need("input")
    grad = call.of("grad_output")
    grad = call.need("grad_out") if grad is None else grad
    dims = inputs.dim()
    others = [k for k in range(dims) if k != 1]
    names = ("weight", "running_mean", "running_var", "save_mean", "save_invstd", "save_var")
    found = [call.of(name) for name in names]
    per_channel = [_channels(x, dims) for x in found if x is not None and x.numel()]
    training = call.get("train", call.get("update", True))
    to_input = combine(grad, *per_channel)
    if training:
        to_input = combine(reduce_labels(combine(grad, inputs), others, True), *per_channel)
    to_weight = reduce_labels(combine(grad, inputs, *per_channel), others)
    return [to_input, to_weight, to_weight]


@label_rule("_weight_norm_interface")
def _weight_norm(call: Call) -> Labels:
    v, dim = call.need("v"), call["dim"] % call["v"].dim()
    norm = reduce_labels(v, [k for k in range(v.dim()) if k != dim], keepdim=True)
    return [combine(norm, call.need("g")), norm]


@label_rule("_weight_norm_interface_backward")
def _weight_norm_backward(call: Call) -> Labels:
    dim = call["dim"] % call["saved_v"].dim()
    joined = combine(*call.all())
    slice_ = reduce_labels(joined, [k for k in range(joined.dim()) if k != dim], keepdim=True)
    return [slice_, slice_]


# --- pixels: pooling, resizing, padding backward ----------------------------------------------


def pixels(call: Call) -> Labels:
    """Everything but the last one, two or three dimensions stays apart."""
    found = re.search(r"([123])d", call.name)
    assert found is not None
    dims = [-k for k in range(1, int(found.group(1)) + 1)]
    return combine(*[reduce_labels(labels, dims, keepdim=True) for labels in call.all()])


_POOLS = "avg_pool{} max_pool{}_with_indices max_unpool{} adaptive_max_pool{} _adaptive_avg_pool{}"
_POOLS += " adaptive_avg_pool{} max_pool{} upsample_nearest{} _upsample_nearest_exact{}"
for _dims in ("1d", "2d", "3d"):
    for _name in _POOLS.format(*[_dims] * 9).split():
        register(pixels, f"{_name} {_name}_backward")
    register(pixels, f"reflection_pad{_dims}_backward replication_pad{_dims}_backward")
for _name in ("linear1d", "bilinear2d", "bicubic2d", "trilinear3d"):
    register(pixels, f"upsample_{_name} upsample_{_name}_backward")
for _name in ("bilinear2d", "bicubic2d", "lanczos2d"):
    register(pixels, f"_upsample_{_name}_aa _upsample_{_name}_aa_backward")


@label_rule(
    "grid_sampler_2d", "grid_sampler_3d", "_grid_sampler_2d_cpu_fallback", "cudnn_grid_sampler"
)
def _grid_sampler(call: Call) -> Labels:
    inputs, grid = call.labels(call.reads()[0]), call.need("grid")
    image = reduce_labels(inputs, range(2, inputs.dim()), keepdim=True)
    return combine(image, reduce_labels(grid, -1).unsqueeze(1))


@label_rule("grid_sampler_2d_backward", "grid_sampler_3d_backward", "affine_grid_generator")
def per_record(call: Call) -> Labels:
    """Every operand and output has the records first; nothing else stays apart."""
    rows = [reduce_labels(labels, range(1, labels.dim())) for labels in call.all()]
    joined = combine(*rows)
    return [0 if t is None else _spread(joined, t.dim()) for t in call.outputs]


register(per_record, "cudnn_grid_sampler_backward")
register(per_record, "fractional_max_pool2d fractional_max_pool3d")


# --- attention --------------------------------------------------------------------------------


def _heads(labels: Tensor, heads: int) -> Tensor:
    """(records, some heads) to (records, heads): grouped-query attention shares key heads."""
    have = labels.shape[1]
    if have == heads or have == 1:
        return labels.expand(labels.shape[0], heads)
    if heads % have == 0:
        return labels.repeat_interleave(heads // have, dim=1)
    return reduce_labels(labels.reshape(labels.shape[0], heads, have // heads), -1)


def _mask(labels: Tensor, records: int, heads: int) -> Tensor:
    labels = reduce_labels(labels, (-2, -1))
    while labels.dim() < 2:
        labels = labels.unsqueeze(0)
    return fit_labels(labels, (records, heads))


def attention(call: Call) -> Labels:
    """Forward and backward of fused attention on (records, heads, time, width)."""
    records, heads = call["query"].shape[:2]
    joined: Tensor | None = None
    for name, value in call.arguments.items():
        if not isinstance(value, Tensor) or value.numel() == 0:
            continue
        labels = call.labels(value)
        if name in ("attn_mask", "attn_bias"):
            per_head = _mask(labels, records, heads)
        elif value.dim() >= 3:
            per_head = _heads(reduce_labels(labels, range(2, labels.dim())), heads)
        else:
            per_head = reduce_labels(labels)
        joined = combine(joined, per_head)
    assert joined is not None
    results: list[Tensor | int | None] = []
    for output in call.outputs:
        if output is None or output.dim() < 3:
            # Random state, cumulative lengths and scratch memory.
            results.append(0)
        elif output.shape[0] == records:
            results.append(_spread(_heads(joined, output.shape[1]), output.dim()))
        else:
            results.append(reduce_labels(joined))
    return results


for _name in ("flash", "efficient", "cudnn"):
    register(attention, f"_scaled_dot_product_{_name}_attention")
    register(attention, f"_scaled_dot_product_{_name}_attention_backward")
register(attention, "_scaled_dot_product_flash_attention_for_cpu")
register(attention, "_scaled_dot_product_flash_attention_for_cpu_backward")
register(attention, "_scaled_dot_product_fused_attention_overrideable")
register(attention, "_scaled_dot_product_fused_attention_overrideable_backward")


@label_rule("_transformer_encoder_layer_fwd", "_native_multi_head_attention")
def _fast_attention(call: Call) -> Labels:
    source = "src" if "src" in call.arguments else "query"
    records = call[source].shape[0]
    rows = []
    for name, value in call.arguments.items():
        if not isinstance(value, Tensor):
            continue
        labels = call.labels(value)
        batched = name in ("src", "query", "key", "value") or (
            name == "mask" and value.dim() == 2 and call.get("mask_type") == 1
        )
        if batched:
            rows.append(reduce_labels(labels, range(1, labels.dim())))
        else:
            rows.append(reduce_labels(labels).expand(records))
    joined = combine(*rows)
    return [0 if t is None else _spread(joined, t.dim()) for t in call.outputs]


# --- recurrent cells --------------------------------------------------------------------------


@label_rule("_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "_thnn_fused_lstm_cell_backward_impl")
def _cell(call: Call) -> Labels:
    rows = []
    for name, value in call.arguments.items():
        if isinstance(value, Tensor):
            labels = call.labels(value)
            # Biases are shared by all records; everything else is (records, width).
            rows.append(reduce_labels(labels) if "bias" in name else reduce_labels(labels, -1))
    joined = combine(*rows)
    results: list[Tensor | int | None] = []
    for output in call.outputs:
        if output is None:
            results.append(0)
        elif output.dim() == 2:
            results.append(joined.unsqueeze(-1))
        else:
            results.append(reduce_labels(joined))
    return results


register(_cell, "_thnn_fused_gru_cell_backward")

_SCRATCH = ("weight_buf", "workspace", "reserve", "dropout_state")
#: What the outputs of fused recurrent layers are; the rest is scratch memory that only the backward
#: of the same operator reads.
_RNN_OUTPUTS = {
    "mkldnn_rnn_layer": ("sequence", "state", "state"),
    "_cudnn_rnn": ("sequence", "state", "state"),
    "mkldnn_rnn_layer_backward": ("sequence", *["weight"] * 4, "state", "state"),
    "_cudnn_rnn_backward": ("sequence", "state", "state", *["weight"] * 1000),
}


@label_rule(*_RNN_OUTPUTS)
def _rnn(call: Call) -> Labels:
    if call.get("batch_sizes"):
        raise NotImplementedError("packed sequences in a fused recurrent layer")
    # The oneDNN layer always gets (time, records, width), whatever its flag says.
    batch_dim = 0 if "cudnn" in call.name and call["batch_first"] else 1
    rows: list[Tensor] = []
    for name, value in call.arguments.items():
        if name in _SCRATCH:
            continue
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if not isinstance(tensor, Tensor) or tensor.numel() == 0:
                continue
            labels = call.labels(tensor)
            if name in ("input", "output", "grad_output"):
                rows.append(reduce_labels(labels, [k for k in range(3) if k != batch_dim]))
            elif re.search(r"[hc][xy]", name):
                kept = labels.dim() - 2
                rows.append(reduce_labels(labels, [k for k in range(labels.dim()) if k != kept]))
            else:
                rows.append(reduce_labels(labels))
    joined = combine(*rows)
    shaped = {
        "sequence": joined.reshape([-1 if k == batch_dim else 1 for k in range(3)]),
        "state": joined.unsqueeze(-1),
        "weight": reduce_labels(joined),
    }
    kinds = _RNN_OUTPUTS[call.name][: len(call.outputs)]
    return [*[shaped[kind] for kind in kinds], *[0] * (len(call.outputs) - len(kinds))]
