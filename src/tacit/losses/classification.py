"""Losses of classes, each with its Lipschitz constant and the derivation.

Cross-entropy, plain, scaled by its temperature and over tokens; its relatives for one output and
for hard records (focal); the cosine; the hinge, the Kantorovich–Rubinstein loss and their sum.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tacit.errors import argument
from tacit.losses.record_loss import LipschitzLoss, positive
from tacit.losses.registry import Task, register_loss


@register_loss("cross-entropy", task=Task.CLASSIFICATION)
@dataclass(frozen=True)
class CrossEntropy(LipschitzLoss):
    """ℓ(h, y) = −Σ_k q_k log softmax(h/τ)_k, q = (1 − s)·e_y + s/K with the smoothing s.

    ∇_h ℓ = (p − q)/τ with p = softmax(h/τ). ‖p − q‖ is convex in p, so it is largest at a corner
    e_k of the simplex. For k = y it is s·√(1 − 1/K). For k ≠ y, p − q = (1 − s)(e_k − e_y) +
    s(e_k − 1/K), whose parts have squared norms 2 and 1 − 1/K and inner product 1:
        ‖p − q‖² = 2(1 − s)² + 2s(1 − s) + s²(1 − 1/K) = 2 − 2s + s²(1 − 1/K),
    which is the larger. So ℓ is √(2 − 2s + s²(1 − 1/K))/τ-Lipschitz in h: √2/τ without smoothing.

    Targets are classes (B,), or probabilities (B, K) in their place: the corners q = e_y are the
    worst of these too. A row that is no distribution would break the constant, so rows are made
    one: what is negative or not finite counts as 0, the rest is divided by its sum.
    Outputs (B, K, …) with a target at each position give the mean over positions, which has a
    smaller constant.
    """

    temperature: float = 1.0
    smoothing: float = 0.0

    def __post_init__(self) -> None:
        positive("temperature", self.temperature)
        _require_share("smoothing", self.smoothing)

    @property
    def lipschitz(self) -> float:
        """The constant for any number of classes: K → ∞ above."""
        return self.lipschitz_for(math.inf)

    def lipschitz_for(self, num_outputs: float) -> float:
        s = self.smoothing
        return math.sqrt(2 - 2 * s + s * s * (1 - 1 / num_outputs)) / self.temperature

    def per_record(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if targets.is_floating_point() and targets.shape == outputs.shape:
            targets = _distributions(targets.to(outputs.dtype))
        losses = F.cross_entropy(
            outputs / self.temperature, targets, reduction="none", label_smoothing=self.smoothing
        )
        return losses if losses.dim() == 1 else losses.flatten(1).mean(dim=1)


@register_loss("scaled-cross-entropy")
@dataclass(frozen=True)
class ScaledCrossEntropy(CrossEntropy):
    """τ·CE(h/τ): cross-entropy whose gradient does not grow as the temperature falls.

    The gradient is that of `CrossEntropy(τ)` times τ, so the constant is √2 at every τ (with
    smoothing s, √(2 − 2s + s²(1 − 1/K))). Learning rates carry over from one τ to another; the
    clipless paper's "temperature" of this loss is 1/τ  [Béthune 2024, App. C.1].
    """

    def lipschitz_for(self, num_outputs: float) -> float:
        return CrossEntropy(1.0, self.smoothing).lipschitz_for(num_outputs)

    def per_record(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.temperature * super().per_record(outputs, targets)


def _require_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name} is {value}; give a number between 0 and 1")


def _distributions(rows: Tensor) -> Tensor:
    """Rows over classes (axis 1) with no negative number and sum 1; uniform where nothing is left.

    A sum that overflows leaves zeros: no target, no gradient.
    """
    kept = torch.where(rows.isfinite(), rows, 0.0).clamp_min(0)
    total = kept.sum(dim=1, keepdim=True)
    return torch.where(total > 0, kept / total, 1 / rows.shape[1])


@register_loss("token-cross-entropy", task=Task.TOKENS)
@dataclass(frozen=True)
class TokenCrossEntropy(LipschitzLoss):
    """ℓ(h, y) = (1/n) Σ_t −Σ_k q_tk log softmax(h_t)_k over the n tokens t with y_t ≠ ignore_index.

    Outputs are (records, tokens, vocabulary) and targets (records, tokens); a record of several
    rows of text has (records, rows, tokens, vocabulary) and (records, rows, tokens). q_t is
    e_{y_t}, with the smoothing s (1 − s)·e_{y_t} + s/V. A record without a token has loss 0.
    `shift=True` is for causal language models, whose output at t predicts token t + 1 of its row:
    h_t is compared with y_{t+1}.

    n is the record's own count, so that records stay apart. The usual mean over all tokens of a
    batch divides by a number that depends on every record: one long text would change everyone's
    gradient.

    ‖∇_h ℓ‖ ≤ √n·(c/n) ≤ c, where c = √(1 + (1 − s)²) bounds each token's gradient
    (`CrossEntropy`), reached with n = 1.

        loss = TokenCrossEntropy(shift=True)   # with Records({"input_ids": ids}, targets=ids)
    """

    ignore_index: int = -100
    shift: bool = False
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        _require_share("label_smoothing", self.label_smoothing)

    def lipschitz_for(self, num_outputs: int) -> float:
        """The constant for any number of tokens and any vocabulary."""
        return CrossEntropy(smoothing=self.label_smoothing).lipschitz

    def per_record(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.dim() not in (3, 4) or targets.shape != outputs.shape[:-1]:
            raise ValueError(
                "TokenCrossEntropy takes outputs of shape (records, tokens, vocabulary) and "
                f"targets of shape (records, tokens); these are {tuple(outputs.shape)} and "
                f"{tuple(targets.shape)}"
            )
        targets = self.aligned(targets)
        losses_BT = F.cross_entropy(
            outputs.flatten(0, -2),
            targets.flatten(),
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            reduction="none",
        ).view(len(targets), -1)
        return losses_BT.sum(dim=1) / self.counts(targets).clamp_min(1)

    def counts(self, aligned: Tensor) -> Tensor:
        """n of each record: (B,)."""
        return (aligned != self.ignore_index).flatten(1).sum(dim=1)

    def aligned(self, targets: Tensor) -> Tensor:
        """The target of each position's output. With `shift` it is the next token, at last none."""
        if not self.shift:
            return targets
        # Shorter targets would ask for a copy of the outputs, which are far larger.
        return F.pad(targets[..., 1:], (0, 1), value=self.ignore_index)


@register_loss("binary-cross-entropy", task=Task.BINARY)
@dataclass(frozen=True)
class BinaryCrossEntropy(LipschitzLoss):
    """ℓ(h, y) = log(1 + exp(−s·h/τ)), s = +1 where the target is positive and −1 elsewhere.

    So targets may be 0/1 or −1/+1. |∂ℓ/∂h| = σ(−s·h/τ)/τ < 1/τ, and 1/τ is approached.
    """

    temperature: float = 1.0

    def __post_init__(self) -> None:
        positive("temperature", self.temperature)

    def lipschitz_for(self, num_outputs: int) -> float:
        self._require_one(num_outputs)
        return 1 / self.temperature

    def per_record(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self._require_one(math.prod(outputs.shape[1:]))
        h_B1 = outputs.reshape(-1, 1)
        return F.softplus(-signs(h_B1, targets) * h_B1 / self.temperature).squeeze(1)

    def _require_one(self, num_outputs: int) -> None:
        if num_outputs != 1:
            raise ValueError(
                f"{type(self).__name__} takes one output per record; the model gives "
                f"{num_outputs}: end it with one output, or use CrossEntropy"
            )


@register_loss("scaled-binary-cross-entropy")
@dataclass(frozen=True)
class ScaledBinaryCrossEntropy(BinaryCrossEntropy):
    """τ·BCE(h/τ): the gradient of `BinaryCrossEntropy(τ)` times τ, so the constant is 1."""

    def lipschitz_for(self, num_outputs: int) -> float:
        return BinaryCrossEntropy().lipschitz_for(num_outputs)

    def per_record(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.temperature * super().per_record(outputs, targets)


@register_loss("multi-label-cross-entropy", task=Task.MULTI_LABEL)
@dataclass(frozen=True)
class MultiLabelCrossEntropy(LipschitzLoss):
    """ℓ(h, y) = (1/L) Σ_l log(1 + exp(−s_l·h_l/τ)), s_l = +1 where label l is there, else −1.

    `BinaryCrossEntropy` of each of a record's L labels, and their mean. Coordinate l of the
    gradient is −s_l·σ(−s_l·h_l/τ)/(τL), of size below 1/(τL). So its norm is below
    √(L/(τL)²) = 1/(τ√L), which is approached where all labels are far on the wrong side.
    """

    temperature: float = 1.0

    def __post_init__(self) -> None:
        positive("temperature", self.temperature)

    def lipschitz_for(self, num_outputs: int) -> float:
        return 1 / (self.temperature * math.sqrt(num_outputs))

    def per_record(self, outputs: Tensor, targets: Tensor) -> Tensor:
        h_BL = outputs.unsqueeze(1) if outputs.dim() == 1 else outputs
        y_BL = targets.unsqueeze(1) if targets.dim() == 1 else targets
        if h_BL.dim() != 2 or h_BL.shape != y_BL.shape:
            raise ValueError(
                "MultiLabelCrossEntropy takes one output and one target, 0 or 1, per label; the "
                f"outputs have shape {tuple(outputs.shape)} and the targets {tuple(targets.shape)}"
            )
        signs_BL = 2 * (y_BL > 0).to(h_BL.dtype) - 1
        return F.softplus(-signs_BL * h_BL / self.temperature).mean(dim=1)


@register_loss("focal", task=Task.CLASSIFICATION)
@dataclass(frozen=True)
class Focal(LipschitzLoss):
    """ℓ(h, y) = −(1 − p)^γ·log p, p = softmax(h)_y.  [Lin 2017; Losing Less, Eq. 6]

    γ = 0 is cross-entropy. With the vector of probabilities P and log p ≤ 0,
        ∇_h ℓ = −φ(p)·(e_y − P),   φ(p) = (1 − p)^γ − γ·p·(1 − p)^(γ−1)·log p ≥ 0,
    and ‖e_y − P‖² = (1 − p)² + Σ_{k≠y} P_k² ≤ 2(1 − p)², with equality where one other class has
    all the rest. So the constant is √2·max_p f(p) with
        f(p) = (1 − p)·φ(p) = (1 − p)^(γ+1) − γ·(1 − p)^γ·p·log p,
    the same for any number of classes from two on. It is √2 for γ = 0, and above that for every
    other γ: 1.6 for γ = 2. `_peak` bounds the maximum from above.
    """

    gamma: float = 2.0

    def __post_init__(self) -> None:
        if not 0 <= self.gamma < math.inf:
            raise ValueError(
                f"{argument('gamma')} is {self.gamma}; give 0 (cross-entropy) or a number above"
            )

    def lipschitz_for(self, num_outputs: int) -> float:
        require_outputs(num_outputs, self, at_least=2)
        return math.sqrt(2) * _peak(self.gamma)

    def per_record(self, outputs: Tensor, targets: Tensor) -> Tensor:
        scores_BK = class_scores(outputs, self, at_least=2)
        true_BK = is_true_class(scores_BK, targets)
        log_p = torch.where(true_BK, scores_BK.log_softmax(dim=1), 0.0).sum(dim=1)
        # At p = 1 the slope of (1 − p)^γ is infinite for γ < 1, and infinity times 0 is NaN.
        rest = (-log_p.expm1()).clamp_min(torch.finfo(log_p.dtype).tiny)
        return -(rest**self.gamma) * log_p


@functools.cache
def _peak(gamma: float, pieces: int = 20_000) -> float:
    """max f over p in [0, 1], from above.

    On a piece [a, b], (1 − p) is largest at a, and −p·log p has its only peak at 1/e: so
        f(p) ≤ (1 − a)^(γ+1) + γ·(1 − a)^γ·(−c·log c),   c = 1/e brought into [a, b].
    Pieces are shorter towards 0, where f turns for a large γ.
    """
    most = 0.0
    for i in range(pieces):
        a, b = (i / pieces) ** 3, ((i + 1) / pieces) ** 3
        c = min(max(math.exp(-1), a), b)
        entropy = -c * math.log(c)
        most = max(most, (1 - a) ** (gamma + 1) + gamma * (1 - a) ** gamma * entropy)
    return most * (1 + 1e-12)


@register_loss("cosine-similarity", task=Task.CLASSIFICATION)
@dataclass(frozen=True)
class CosineSimilarity(LipschitzLoss):
    """ℓ(h, y) = −h_y / max(F, ‖h‖): outputs shorter than the floor F are not normalised.

    Below the floor the gradient is −e_y/F. Above it, with the unit vector u = h/‖h‖, it is
    −(e_y − u_y·u)/‖h‖, a projection of e_y divided by ‖h‖ ≥ F. So the constant is 1/F, reached
    below the floor; without a floor there is none  [Béthune 2024, App. C.1].
    """

    floor: float = 1.0

    def __post_init__(self) -> None:
        positive("floor", self.floor)

    def lipschitz_for(self, num_outputs: int) -> float:
        return 1 / self.floor

    def per_record(self, outputs: Tensor, targets: Tensor) -> Tensor:
        scores_BK = class_scores(outputs, self, at_least=2)
        true_B = torch.where(is_true_class(scores_BK, targets), scores_BK, 0).sum(dim=1)
        norms_B = torch.linalg.vector_norm(scores_BK, dim=1)
        return -true_B / norms_B.clamp_min(self.floor)


@register_loss("hinge", task=Task.CLASSIFICATION)
@dataclass(frozen=True)
class MulticlassHinge(LipschitzLoss):
    """ℓ(h, y) = (1/K) Σ_k max(0, m/2 − s_k·h_k), s_y = +1 and s_k = −1 otherwise.

    Each term's gradient is −s_k/K or 0, in a coordinate of its own: ‖∇ℓ‖² ≤ K/K², and all terms
    are active near h = 0. So the constant is 1/√K exactly; the published 1 asks for √K times the
    noise  [Béthune 2024, Table 4]. With one output per record, s is the target's sign and K = 1.
    """

    margin: float = 1.0

    def __post_init__(self) -> None:
        positive("margin", self.margin)

    def lipschitz_for(self, num_outputs: int) -> float:
        return 1 / math.sqrt(num_outputs)

    def per_record(self, outputs: Tensor, targets: Tensor) -> Tensor:
        scores_BK = class_scores(outputs, self)
        short_BK = self.margin / 2 - signs(scores_BK, targets) * scores_BK
        return short_BK.relu().mean(dim=1)


@register_loss("kantorovich-rubinstein", task=Task.CLASSIFICATION)
@dataclass(frozen=True)
class KantorovichRubinstein(LipschitzLoss):
    """ℓ(h, y) = −h_y + Σ_{k≠y} h_k/(K − 1), with all classes taken to be equally likely.

    One against the rest, the distance of class k is E[h_k | y = k] − E[h_k | y ≠ k]
    [Béthune 2024, Eq. 8]. With priors 1/K the mean over k is E[h_y − Σ_{k≠y} h_k/(K − 1)], whose
    negative this is. The gradient is the same everywhere, of norm √(1 + 1/(K − 1)).

    Published code estimates the priors by the classes of the batch. Then the record that is alone
    in its class has a gradient of the order of the batch, and no constant holds. With one output
    per record, ℓ = −s·h with the target's sign s, and the constant is 1.
    """

    def lipschitz_for(self, num_outputs: int) -> float:
        return math.sqrt(1 + 1 / (num_outputs - 1)) if num_outputs > 1 else 1.0

    def per_record(self, outputs: Tensor, targets: Tensor) -> Tensor:
        scores_BK = class_scores(outputs, self)
        share = 1 / max(scores_BK.shape[1] - 1, 1)
        weighted_BK = torch.where(is_true_class(scores_BK, targets), scores_BK, share * scores_BK)
        return -(signs(scores_BK, targets) * weighted_BK).sum(dim=1)


@register_loss("hinge-kantorovich-rubinstein", task=Task.CLASSIFICATION)
@dataclass(frozen=True)
class HingeKantorovichRubinstein(LipschitzLoss):
    """ℓ = α·`MulticlassHinge(margin)` + `KantorovichRubinstein()`  [Serrurier 2021].

    Where all hinge terms are active, both gradients have the sign −s_k in every coordinate, so
    they add up there and nowhere exceed it:
        (1 + α/K)² + (K − 1)·(1/(K − 1) + α/K)² = K/(K − 1) + 4α/K + α²/K
    is the square of the constant. With one output per record it is 1 + α.
    """

    alpha: float = 1.0
    margin: float = 1.0

    def __post_init__(self) -> None:
        positive("alpha", self.alpha)
        positive("margin", self.margin)

    def lipschitz_for(self, num_outputs: int) -> float:
        a, k = self.alpha, num_outputs
        return 1 + a if k == 1 else math.sqrt(k / (k - 1) + 4 * a / k + a * a / k)

    def per_record(self, outputs: Tensor, targets: Tensor) -> Tensor:
        hinge = MulticlassHinge(self.margin).per_record(outputs, targets)
        return self.alpha * hinge + KantorovichRubinstein().per_record(outputs, targets)


def class_scores(outputs: Tensor, loss: object, at_least: int = 1) -> Tensor:
    """(B, K) as it is and (B,) as (B, 1). More axes would make K another number than it seems."""
    scores_BK = outputs.unsqueeze(1) if outputs.dim() == 1 else outputs
    if scores_BK.dim() != 2:
        raise ValueError(
            f"{type(loss).__name__} takes outputs of shape (records, classes); these have "
            f"{tuple(outputs.shape)}: flatten them, or use CrossEntropy"
        )
    require_outputs(scores_BK.shape[1], loss, at_least)
    return scores_BK


def require_outputs(num_outputs: int, loss: object, at_least: int) -> None:
    if num_outputs < at_least:
        raise ValueError(
            f"{type(loss).__name__} takes two outputs per record or more; the model gives "
            f"{num_outputs}: end it with one output per class"
        )


def is_true_class(scores_BK: Tensor, targets: Tensor) -> Tensor:
    """Where k = y. With one score per record: where the target is positive, so 0/1 and −1/+1 do."""
    num_classes = scores_BK.shape[1]
    if num_classes == 1:
        return targets.reshape(-1, 1) > 0
    # Not F.one_hot, which asks the device whether a label is too large.
    classes_K = torch.arange(num_classes, device=targets.device)
    return targets.reshape(-1, 1) == classes_K


def signs(scores_BK: Tensor, targets: Tensor) -> Tensor:
    """+1 for the true class, −1 for the others, in the scores' type."""
    return 2 * is_true_class(scores_BK, targets).to(scores_BK.dtype) - 1
