"""Recurrent layers as linear maps of records, around one operator over time without parameters.

PyTorch's fused LSTM, GRU and RNN hide their parameters, and as a program of simple operators they
are some twenty of them for each moment. Here a layer is

    p_t = W_ih·x_t + b_ih                         a linear map
    h   = scan(p, h_0; stop(W_hh), stop(b_hh))    one operator; cuDNN's, on a GPU

and the recurrent weights get their gradient elsewhere. With a_t the pre-activations, the backward
pass of the scan gives δ_t = ∂L/∂a_t = ∂L/∂p_t, through all later moments. W_hh enters a_t as
z_t = W_hh·h_{t−1} + b_hh, so ∂L/∂W_hh = Σ_t δ_t·h_{t−1}ᵀ: the gradient of a linear map of the
constants h_{t−1}. `_Joined` gives p the gradient of p + z, without computing z, and a rule of its
own for the gradients of each record. In a GRU the new state is tanh(p_n + r ⊙ z_n), so its share of
∂L/∂z is multiplied by r.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tacit.engines.products import Dense
from tacit.engines.rules import RuleResult, Use, gradient_rule
from tacit.precision import wide, wide_dtype
from tacit.torch_internals import (
    cudnn_flat_weights,
    cudnn_rnn,
    cudnn_rnn_backward,
)


class _Layers(NamedTuple):
    """The arguments of PyTorch's `lstm`, `gru`, `rnn_tanh` and `rnn_relu`."""

    x: Tensor
    states: Any
    weights: Sequence[Tensor]
    biases: bool
    num_layers: int
    dropout: float
    training: bool
    bidirectional: bool
    batch_first: bool


def decomposed(kind: str, args: Sequence[Any]) -> Callable[[], Any] | None:
    """The call of a fused recurrent function as linear maps and scans, or None.

    Packed sequences and projections (`proj_size`) are not decomposed here.
    """
    if len(args) != len(_Layers._fields) or isinstance(args[3], list | tuple):
        return None
    layers = _Layers(*args)
    per_layer = (4 if layers.biases else 2) * (2 if layers.bidirectional else 1)
    if len(layers.weights) != per_layer * layers.num_layers:
        return None
    return functools.partial(_run, kind, layers)


def _run(kind: str, layers: _Layers) -> tuple[Tensor, ...]:
    # Time first, as PyTorch has it: then dropout draws the same numbers.
    x = layers.x.transpose(0, 1) if layers.batch_first else layers.x
    h, c = layers.states if kind == "lstm" else (layers.states, layers.states)
    last_h: list[Tensor] = []
    last_c: list[Tensor] = []
    weights = iter(layers.weights)
    for layer in range(layers.num_layers):
        outputs = []
        for backwards in (False, True)[: 2 if layers.bidirectional else 1]:
            w_ih, w_hh = next(weights), next(weights)
            b_ih, b_hh = (next(weights), next(weights)) if layers.biases else (None, None)
            p = F.linear(x, w_ih, b_ih)
            p = p.flip(0) if backwards else p
            place = len(last_h)
            output, of_h, of_c = _direction(kind, p, h[place], c[place], w_hh, b_hh)
            last_h.append(of_h)
            last_c.append(of_c)
            outputs.append(output.flip(0) if backwards else output)
        x = torch.cat(outputs, -1) if layers.bidirectional else outputs[0]
        if layers.dropout and layer < layers.num_layers - 1:
            x = F.dropout(x, layers.dropout, layers.training)
    x = x.transpose(0, 1) if layers.batch_first else x
    states = (torch.stack(last_h), torch.stack(last_c))
    return (x, *states) if kind == "lstm" else (x, states[0])


def _direction(
    kind: str, p: Tensor, h: Tensor, c: Tensor, w_hh: Tensor, b_hh: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(outputs, last h, last c) of one layer in one direction."""
    scanned_in = wide_dtype(p.dtype)
    bias = w_hh.new_zeros(len(w_hh)) if b_hh is None else b_hh
    fixed = [t.detach().to(scanned_in) for t in (h, c, w_hh, bias)]
    with torch.no_grad():
        scanned = _scan(p.detach().to(scanned_in).contiguous(), *fixed, kind)
        before = torch.cat([fixed[0][None], scanned[0][:-1]]).to(p.dtype)
        r = _reset_gate(p, before, w_hh, bias) if kind == "gru" else None
    live = [t.to(scanned_in) for t in (p, h, c, w_hh, bias)]
    joined = _Joined.apply(p, before, r, w_hh, b_hh, kind, live)
    # Shadow memory notes what a node gave when an operator reads it, such as this view.
    timed = joined.view_as(joined).to(scanned_in).contiguous()
    output, last_c = _Scan.apply(timed, *live[1:3], *fixed[2:], *scanned, kind, live)
    return output.to(p.dtype), output[-1].to(p.dtype), last_c.to(p.dtype)


def _reset_gate(p: Tensor, before: Tensor, w_hh: Tensor, bias: Tensor) -> Tensor:
    H = w_hh.shape[1]
    return (p[..., :H] + F.linear(before, w_hh[:H], bias[:H])).sigmoid()


class _Joined(torch.autograd.Function):
    """p, with the gradient of p + z.

    In a gradient of a gradient the states and the reset gate depend on `live`, as in `_Scan`.
    """

    @staticmethod
    def forward(ctx: Any, p: Tensor, before: Tensor, r: Tensor | None, *others: Any) -> Tensor:
        *_, ctx.kind, ctx.live = others
        ctx.save_for_backward(before, r)
        return p.view_as(p)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        before, r = ctx.saved_tensors
        _, _, _, weight, bias, *_ = ctx.needs_input_grad
        if torch.is_grad_enabled() and (weight or bias):
            p, h, _, w_hh, b_hh = ctx.live
            outputs, _ = _steps(ctx.kind, *ctx.live)
            states = torch.cat([h[None], outputs[:-1]])
            r = None if r is None else _reset_gate(p, states, w_hh, b_hh).to(r.dtype)
            before = states.to(before.dtype)
        of_z = _of_products(grad, r).flatten(0, 1)
        of_weight = of_z.T @ before.flatten(0, 1) if weight else None
        return grad, None, None, of_weight, of_z.sum(0) if bias else None, None, None


def _of_products(of_p: Tensor, r: Tensor | None) -> Tensor:
    """∂L/∂z from ∂L/∂p, with the reset gate of a GRU."""
    if r is None:
        return of_p
    H = r.shape[-1]
    return torch.cat([of_p[..., : 2 * H], r * of_p[..., 2 * H :]], -1)


@gradient_rule(_Joined)
def _joined(use: Use) -> RuleResult:
    """Σ_t ∂L/∂z_t·h_{t−1}ᵀ and Σ_t ∂L/∂z_t of each record."""
    before, r = use.node.saved_tensors
    b = _of_products(wide(use.cotangent), None if r is None else wide(r))
    if use.layout.dim > 1 or use.layout.kind == "scattered":
        return None
    b_BTP, a_BTD = (use.rows(t, use.layout.dim).flatten(1, -2) for t in (b, wide(before)))
    return b_BTP.sum(1) if len(use.shape) == 1 else Dense(a_BTD, b_BTP)


class _Scan(torch.autograd.Function):
    """The scan that was computed before, with its backward pass.

    A gradient of a gradient (`create_graph=True`) depends on the weights, which are constants here.
    Then it is the backward pass of simple operators on `live`, which has the weights themselves.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        *tensors, kind, live = given
        p, h, c, w_hh, b_hh, output, last_c, kept = tensors
        ctx.save_for_backward(p, h, c, w_hh, b_hh, output, kept)
        ctx.kind, ctx.live = kind, live
        return output.clone(), last_c.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_c: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            starts = [t if t.requires_grad else t.detach().requires_grad_() for t in ctx.live[:3]]
            ends = _steps(ctx.kind, *starts, *ctx.live[3:])
            found = torch.autograd.grad(ends, starts, (grad, grad_c), create_graph=True)
        else:
            found = _scan_backward(*ctx.saved_tensors, grad, grad_c, ctx.kind)
        of_p, of_h, of_c = found
        return of_p, of_h, of_c if ctx.kind == "lstm" else None, *(None,) * 7


def _steps(
    kind: str, p: Tensor, h: Tensor, c: Tensor, w_hh: Tensor, b_hh: Tensor
) -> tuple[Tensor, Tensor]:
    """(outputs, last c) of the scan, as a program of simple operators."""
    outputs = []
    for p_t in p.unbind():
        z = F.linear(h, w_hh, b_hh)
        if kind == "lstm":
            i, f, g, o = (p_t + z).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        elif kind == "gru":
            (p_r, p_u, p_n), (z_r, z_u, z_n) = p_t.chunk(3, 1), z.chunk(3, 1)
            n = (p_n + (p_r + z_r).sigmoid() * z_n).tanh()
            h = n + (p_u + z_u).sigmoid() * (h - n)
        else:
            h = (p_t + z).tanh() if kind == "tanh" else (p_t + z).relu()
        outputs.append(h)
    return torch.stack(outputs), c


# --- the operator ---------------------------------------------------------------------------------

_LIBRARY = torch.library.Library("tacit", "DEF")
_LIBRARY.define(
    "recurrence(Tensor p, Tensor h, Tensor c, Tensor w_hh, Tensor b_hh, str kind) "
    "-> (Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "recurrence_backward(Tensor p, Tensor h, Tensor c, Tensor w_hh, Tensor b_hh, Tensor output, "
    "Tensor kept, Tensor grad, Tensor grad_c, str kind) -> (Tensor, Tensor, Tensor)"
)


def _implements(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        return function

    return register


@_implements("recurrence")
def _forward(
    p: Tensor, h: Tensor, c: Tensor, w_hh: Tensor, b_hh: Tensor, kind: str
) -> tuple[Tensor, Tensor, Tensor]:
    """(outputs (T, B, H), last c, what the backward pass needs), with p as (T, B, gates·H)."""
    if _by_cudnn(p):
        output, _, last, kept, _ = cudnn_rnn(p, *_cudnn_arguments(p, h, c, w_hh, b_hh, kind))
        _KEPT_BYTES[_shape_key(p, w_hh, kind)] = kept.numel()
        return output, last[0] if kind == "lstm" else torch.zeros_like(h), kept
    kept = p.new_empty(len(p), len(h), _kept_per_unit(kind) * h.shape[1])
    output = p.new_empty(len(p), *h.shape)
    w, last_c = w_hh.t(), c
    for t, p_t in enumerate(p.unbind()):
        z = torch.addmm(b_hh, h, w)
        if kind == "lstm":
            i, f, g, o = (p_t + z).chunk(4, 1)
            i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
            last_c = f * last_c + i * g
            h = o * last_c.tanh()
            torch.cat([i, f, g, o, last_c], 1, out=kept[t])
        elif kind == "gru":
            (p_r, p_u, p_n), (z_r, z_u, z_n) = p_t.chunk(3, 1), z.chunk(3, 1)
            r, u = (p_r + z_r).sigmoid(), (p_u + z_u).sigmoid()
            n = (p_n + r * z_n).tanh()
            h = n + u * (h - n)
            torch.cat([r, u, n, z_n], 1, out=kept[t])
        else:
            h = (p_t + z).tanh() if kind == "tanh" else (p_t + z).relu()
        output[t] = h
    return output, last_c.clone() if kind == "lstm" else torch.zeros_like(h), kept


@_implements("recurrence_backward")
def _backward(
    p: Tensor,
    h: Tensor,
    c: Tensor,
    w_hh: Tensor,
    b_hh: Tensor,
    output: Tensor,
    kept: Tensor,
    grad: Tensor,
    grad_c: Tensor,
    kind: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients in p, h and c."""
    # Here and not before: what a backward pass calls must not depend on a cotangent's strides.
    grad, grad_c = grad.contiguous(), grad_c.contiguous()
    if _by_cudnn(p):
        weights, stride, buffer, h_0, c_0, *settings = _cudnn_arguments(p, h, c, w_hh, b_hh, kind)
        last = grad_c[None] if kind == "lstm" else None
        of_p, of_h, of_c, _ = cudnn_rnn_backward(
            *(p, weights, stride, buffer, h_0, c_0, output, grad, None, last),
            # This writes to what the forward pass kept, which another backward pass may read.
            *(*settings, kept.clone(), [True, True, kind == "lstm", False]),
        )
        return of_p, of_h.view_as(h), of_c.view_as(h) if kind == "lstm" else torch.zeros_like(h)
    of_p, of_h, of_c = torch.empty_like(p), torch.zeros_like(h), grad_c
    for t in reversed(range(len(p))):
        of_h = of_h + grad[t]
        if kind == "lstm":
            i, f, g, o, c_t = kept[t].chunk(5, 1)
            c_before = kept[t - 1].chunk(5, 1)[4] if t else c
            bent = c_t.tanh()
            of_c = of_c + of_h * o * (1 - bent * bent)
            before = [of_c * g, of_c * c_before, of_c * i, of_h * bent]
            slopes = [i * (1 - i), f * (1 - f), 1 - g * g, o * (1 - o)]
            torch.cat([x * y for x, y in zip(before, slopes, strict=True)], 1, out=of_p[t])
            of_c, of_h = of_c * f, of_p[t] @ w_hh
        elif kind == "gru":
            r, u, n, z_n = kept[t].chunk(4, 1)
            h_before = output[t - 1] if t else h
            of_n = of_h * (1 - u) * (1 - n * n)
            of_r, of_u = of_n * z_n * r * (1 - r), of_h * (h_before - n) * u * (1 - u)
            torch.cat([of_r, of_u, of_n], 1, out=of_p[t])
            of_h = of_h * u + torch.cat([of_r, of_u, of_n * r], 1) @ w_hh
        else:
            h_t = output[t]
            of_p[t] = of_h * (1 - h_t * h_t if kind == "tanh" else (h_t > 0).to(h_t.dtype))
            of_h = of_p[t] @ w_hh
    return of_p, of_h, of_c.clone()


def _by_cudnn(p: Tensor) -> bool:
    """Whether cuDNN computes it, which takes any records but none at all."""
    return p.is_cuda and p.numel() > 0 and torch.backends.cudnn.is_acceptable(p)


def _cudnn_arguments(
    p: Tensor, h: Tensor, c: Tensor, w_hh: Tensor, b_hh: Tensor, kind: str
) -> Iterator[Any]:
    """The arguments of cuDNN's layer behind its input: p times the identity is p.

    Dropout is zero and the layer trains, so it keeps what the backward pass needs.
    """
    H, mode = w_hh.shape[1], ("relu", "tanh", "lstm", "gru").index(kind)
    eye = torch.eye(len(w_hh), dtype=p.dtype, device=p.device)
    weights = [eye, w_hh.clone(), torch.zeros_like(b_hh), b_hh.clone()]
    # This makes the four tensors views of the buffer.
    buffer = cudnn_flat_weights(weights, 4, len(w_hh), mode, H, 0, 1, False, False)
    yield from (weights, 4, buffer, h[None].contiguous())
    yield c[None].contiguous() if kind == "lstm" else None
    yield from (mode, H, 0, 1, False, 0.0, True, False, [], None)


def _kept_per_unit(kind: str) -> int:
    return {"lstm": 5, "gru": 4}.get(kind, 0)


# What cuDNN keeps has a size that only a run tells. A step is traced after it has run.
_KEPT_BYTES: dict[tuple[Any, ...], int] = {}


def _shape_key(p: Tensor, w_hh: Tensor, kind: str) -> tuple[Any, ...]:
    return kind, *(int(n) for n in (*p.shape, *w_hh.shape)), p.dtype


@torch.library.register_fake("tacit::recurrence", lib=_LIBRARY)
def _fake(p: Tensor, h: Tensor, c: Tensor, w_hh: Tensor, b_hh: Tensor, kind: str) -> Any:
    if p.is_cuda and p.numel() > 0:
        kept = p.new_empty(_KEPT_BYTES[_shape_key(p, w_hh, kind)], dtype=torch.uint8)
    else:
        kept = p.new_empty(p.shape[0], h.shape[0], _kept_per_unit(kind) * h.shape[1])
    return p.new_empty(p.shape[0], *h.shape), torch.empty_like(h), kept


@torch.library.register_fake("tacit::recurrence_backward", lib=_LIBRARY)
def _fake_backward(p: Tensor, h: Tensor, *others: Any) -> Any:
    return torch.empty_like(p), torch.empty_like(h), torch.empty_like(h)


_scan = torch.ops.tacit.recurrence
_scan_backward = torch.ops.tacit.recurrence_backward
