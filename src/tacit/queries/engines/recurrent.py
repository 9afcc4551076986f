"""RNN, GRU, LSTM and their cells in the open: W_ih x_t + c_ih and W_hh h_{t−1} + c_hh at each t."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tacit.errors import UnsupportedModule
from tacit.queries.engines.products import Products

# From (z_t, y_t, state) to the next state; a state is (h,), or (h, c) in an LSTM.
State = tuple[Tensor, ...]
Step = Callable[[Tensor, Tensor, State], State]


def open_recurrent(
    module: nn.RNNBase,
    products: Products,
    batch: int,
    input: Tensor,
    hx: Tensor | State | None = None,
) -> tuple[Tensor, Tensor | State]:
    """nn.RNN, nn.GRU and nn.LSTM: outputs and last states, as the module itself returns them."""
    records_first = input if module.batch_first else input.transpose(0, 1)
    if input.dim() != 3 or len(records_first) != batch:
        raise UnsupportedModule(
            f"{type(module).__name__} with batch_first={module.batch_first} saw a tensor of shape "
            f"{tuple(input.shape)} where there are {batch} records; give it (records, positions, "
            "width) with batch_first=True, and the first two exchanged without"
        )
    x_BTD = records_first
    given = hx if isinstance(hx, tuple) or hx is None else (hx,)
    directions = 2 if module.bidirectional else 1
    last: list[State] = []
    for layer in range(module.num_layers):
        if layer > 0:
            x_BTD = F.dropout(x_BTD, module.dropout, module.training)
        outputs = []
        for direction in range(directions):
            which = layer * directions + direction
            suffix = f"_l{layer}" + ("_reverse" if direction else "")
            start = _start(module, x_BTD, given and tuple(s[which] for s in given))
            states = _run(module, products, x_BTD, suffix, start, backwards=direction == 1)
            outputs.append(torch.stack([s[0] for s in states], dim=1))
            last.append(states[0 if direction else -1])
        x_BTD = torch.cat(outputs, dim=-1)
    ends = tuple(torch.stack(column) for column in zip(*last, strict=True))
    made = x_BTD if module.batch_first else x_BTD.transpose(0, 1)
    return made, ends if isinstance(module, nn.LSTM) else ends[0]


def open_cell(
    module: nn.RNNCellBase,
    products: Products,
    batch: int,
    input: Tensor,
    hx: Tensor | State | None = None,
) -> Tensor | State:
    """nn.RNNCell, nn.GRUCell and nn.LSTMCell: one step."""
    if input.dim() != 2 or len(input) != batch:
        raise UnsupportedModule(
            f"{type(module).__name__} saw a tensor of shape {tuple(input.shape)} where there are "
            f"{batch} records; give it (records, width)"
        )
    given = hx if isinstance(hx, tuple) or hx is None else (hx,)
    x_BTD = input.unsqueeze(1)
    (state,) = _run(module, products, x_BTD, "", _start(module, x_BTD, given))
    return state if isinstance(module, nn.LSTMCell) else state[0]


def _run(
    module: nn.RNNBase | nn.RNNCellBase,
    products: Products,
    x_BTD: Tensor,
    suffix: str,
    state: State,
    backwards: bool = False,
) -> list[State]:
    """The state after each position, in the order of positions."""
    step = _STEPS[_kind(module)]
    z_BTG = products(x_BTD, "weight_ih" + suffix, "bias_ih" + suffix)
    states = []
    times = range(x_BTD.shape[1])
    for t in reversed(times) if backwards else times:
        y = products(state[0].unsqueeze(1), "weight_hh" + suffix, "bias_hh" + suffix)
        state = step(z_BTG[:, t], y[:, 0], state)
        if getattr(module, "proj_size", 0):
            h = products(state[0].unsqueeze(1), "weight_hr" + suffix, "no bias")[:, 0]
            state = (h, *state[1:])
        states.append(state)
    return states[::-1] if backwards else states


def _start(
    module: nn.RNNBase | nn.RNNCellBase, x_BTD: Tensor, given: tuple[Tensor, ...] | None
) -> State:
    """The given state, or zeros."""
    if given is not None:
        return given
    hidden = x_BTD.new_zeros(len(x_BTD), module.hidden_size)
    if not isinstance(module, nn.LSTM | nn.LSTMCell):
        return (hidden,)
    return hidden[:, : getattr(module, "proj_size", 0) or None], hidden


def _kind(module: nn.RNNBase | nn.RNNCellBase) -> str:
    if isinstance(module, nn.LSTM | nn.LSTMCell):
        return "lstm"
    if isinstance(module, nn.GRU | nn.GRUCell):
        return "gru"
    return str(module.nonlinearity)


def _lstm(z: Tensor, y: Tensor, state: State) -> State:
    i, f, g, o = (z + y).chunk(4, dim=-1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru(z: Tensor, y: Tensor, state: State) -> State:
    (r, u, n), (r_h, u_h, n_h) = z.chunk(3, dim=-1), y.chunk(3, dim=-1)
    update = (u + u_h).sigmoid()
    new = (n + (r + r_h).sigmoid() * n_h).tanh()
    return ((1 - update) * new + update * state[0],)


_STEPS: dict[str, Step] = {
    "tanh": lambda z, y, _: ((z + y).tanh(),),
    "relu": lambda z, y, _: ((z + y).relu(),),
    "gru": _gru,
    "lstm": _lstm,
}
