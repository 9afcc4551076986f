"""Rules of loss functions and their backwards."""

from __future__ import annotations

from torch import Tensor

from tacit.engines.shadow_labels import combine, reduce_labels
from tacit.engines.shadow_rules import Call, Labels, label_rule, register


@label_rule("mse_loss", "binary_cross_entropy", "smooth_l1_loss", "huber_loss", "soft_margin_loss")
def _loss(call: Call) -> Labels:
    joined = combine(*call.all())
    return reduce_labels(joined) if call["reduction"] else joined


@label_rule("binary_cross_entropy_with_logits", "l1_loss")
def _loss_with_logits(call: Call) -> Labels:
    return _loss(call)


@label_rule("mse_loss_backward", "binary_cross_entropy_backward", "smooth_l1_loss_backward")
def _loss_backward(call: Call) -> Labels:
    return combine(*call.all())


register(_loss_backward, "huber_loss_backward soft_margin_loss_backward")


@label_rule("nll_loss_forward", "nll_loss2d_forward")
def _nll(call: Call) -> Labels:
    scores, target = call.need("self"), call.need("target")
    classes = 0 if scores.dim() == 1 else 1
    weight = call.of("weight")
    shared = [] if weight is None else [reduce_labels(weight)]
    element = combine(reduce_labels(scores, classes), target, *shared)
    total = reduce_labels(combine(target, *shared))
    if call["reduction"] == 0:
        return [element, 0]
    return [reduce_labels(element), total]


@label_rule("nll_loss_backward", "nll_loss2d_backward")
def _nll_backward(call: Call) -> Labels:
    scores = call["self"]
    classes = 0 if scores.dim() == 1 else 1
    grad, target = call.need("grad_output"), call.need("target")
    if target.dim() == scores.dim() - 1:
        target = target.unsqueeze(classes)
    if grad.dim() == scores.dim() - 1:
        grad = grad.unsqueeze(classes)
    weight = call.of("weight")
    shared = [] if weight is None else [reduce_labels(weight)]
    if call["reduction"] == 1:
        shared.append(reduce_labels(call.need("total_weight")))
    return combine(grad, target, *shared)


@label_rule("multi_margin_loss", "multilabel_margin_loss_forward")
def _margin(call: Call) -> Labels:
    scores, target = call.need("self"), call.need("target")
    weight = call.of("weight")
    row = reduce_labels(scores, -1)
    row = combine(row, reduce_labels(target, -1) if target.dim() == scores.dim() else target)
    row = row if weight is None else combine(row, reduce_labels(weight))
    loss = reduce_labels(row) if call["reduction"] else row
    is_target = row.unsqueeze(-1) if scores.dim() else row
    return [loss, is_target][: len(call.outputs)]


@label_rule("multi_margin_loss_backward", "multilabel_margin_loss_backward")
def _margin_backward(call: Call) -> Labels:
    rows = []
    dims = call["self"].dim()
    for name in ("grad_output", "self", "target", "is_target"):
        labels = call.of(name)
        if labels is None:
            continue
        if labels.dim() == dims:
            labels = reduce_labels(labels, -1)
        rows.append(labels)
    weight = call.of("weight")
    shared = [] if weight is None else [reduce_labels(weight)]
    return (
        combine(*rows, *shared).unsqueeze(-1)
        if dims > 1
        else reduce_labels(combine(*rows, *shared))
    )


@label_rule("_ctc_loss", "_ctc_loss_backward")
def _ctc(call: Call) -> Labels:
    log_probs, targets = call.need("log_probs"), call.need("targets")
    if log_probs.dim() != 3 or targets.dim() != 2:
        raise NotImplementedError("concatenated targets")
    rows = [reduce_labels(log_probs, (0, 2)), reduce_labels(targets, 1)]
    for name in ("input_lengths", "target_lengths", "grad", "neg_log_likelihood"):
        labels = call.of(name)
        rows += [] if labels is None else [labels]
    joined = combine(*rows)
    results: list[Tensor | int | None] = []
    for output in call.outputs:
        if output is None:
            results.append(0)
        elif call.name == "_ctc_loss_backward":
            results.append(joined.reshape(1, -1, 1))
        else:
            results.append(joined.reshape(-1, *[1] * (output.dim() - 1)))
    return results
