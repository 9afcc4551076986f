"""A gradient rule compared with autograd, one record at a time, in float64."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tacit.errors import UnsupportedModule
from tacit.queries.engines.rows import RecordGradients
from tacit.queries.engines.rules import RULES, as_gradients

_TOLERANCE = 1e-8  # of the largest gradient: both sides are float64


@dataclass(frozen=True)
class GradientRuleCheck:
    """By parameter: the largest error of the rule, and its largest norm over the true one.

    Errors are relative to the largest gradient. A ratio of 1 is an exact norm, above 1 one from
    above, which clips more than it must.
    """

    errors: dict[str, float]
    norm_ratios: dict[str, float]


def check_gradient_rule(module: nn.Module, example_inputs: Tensor) -> GradientRuleCheck:
    """Compare the rule that is registered for a module's class with a loop of autograd.

    `example_inputs` holds records along its first dimension, two at least; take inputs of the
    shapes and kinds that the model meets. For random output gradients, and each record alone:

        rows    g_i = ∂⟨b_i, f(x_i)⟩/∂θ of every record
        norms   squares()_i ≥ ‖g_i‖²
        sums    total(s) = Σ_i s_i·g_i, in which a record with s_i = 0 is left out, NaN or not

    ValueError names the first that does not hold. What is not tried here is not checked.

        tacit.check_gradient_rule(nn.Linear(3, 2), torch.randn(4, 3))
    """
    kind = type(module).__name__
    rule = RULES.get(type(module))
    if rule is None:
        raise UnsupportedModule(
            f"no gradient rule is registered for {kind}; write one and decorate it with "
            f"@tacit.register_gradient_rule({kind})"
        )
    if len(example_inputs) < 2:
        raise ValueError(f"{len(example_inputs)} example inputs; give two records at least")
    double = copy.deepcopy(module).double()
    x = example_inputs.double() if example_inputs.is_floating_point() else example_inputs
    before = {n: t.clone() for n, t in double.state_dict().items()}
    cotangent, expected = _one_by_one(double, x)

    def ask(wanted: set[str], inputs: Tensor, b: Tensor) -> dict[str, RecordGradients]:
        with torch.no_grad():
            found = as_gradients(rule(double, set(wanted), inputs, b))
        if set(found) != wanted:
            raise ValueError(
                f"the rule of {kind} was asked for {sorted(wanted)} and answers {sorted(found)}; "
                "give an entry for each parameter that is wanted, and no other"
            )
        return found

    names = set(expected)
    found = ask(names, x, cotangent)
    errors, ratios = {}, {}
    for name in names:
        errors[name], ratios[name] = _compare(f"{name} of {kind}", found[name], expected[name])
        alone = ask({name}, x[:1], cotangent[:1])[name]
        _compare(f"{name} of {kind} (one record, one parameter)", alone, expected[name][:1])
    _check_left_out(kind, ask(names, *_spoilt(x, cotangent)), expected)
    if any(not torch.equal(before[n], t) for n, t in double.state_dict().items()):
        raise ValueError(f"the rule of {kind} changes the module; compute without writing to it")
    return GradientRuleCheck(errors, ratios)


def _one_by_one(module: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Random output gradients b, and ∂⟨b_i, f(x_i)⟩/∂θ of each record in a pass of its own."""
    parameters = dict(module.named_parameters(recurse=False))
    outputs = [module(x[i : i + 1]) for i in range(len(x))]
    generator = torch.Generator().manual_seed(0)
    shape = (len(x), *outputs[0].shape[1:])
    b = torch.randn(shape, generator=generator, dtype=torch.float64)
    rows: dict[str, list[Tensor]] = {name: [] for name in parameters}
    for i, output in enumerate(outputs):
        value = (output * b[i : i + 1]).sum()
        gradients = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
        for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
            rows[name].append(torch.zeros_like(parameter) if gradient is None else gradient)
    return b, {name: torch.stack(found).detach() for name, found in rows.items()}


def _compare(what: str, found: RecordGradients, expected: Tensor) -> tuple[float, float]:
    size = float(expected.abs().max()) + 1e-300
    rows = found.rows()
    if rows.shape != expected.shape:
        raise ValueError(
            f"the rule of {what} gives rows of shape {tuple(rows.shape)}; the records' gradients "
            f"have {tuple(expected.shape)}"
        )
    error = float((rows - expected).abs().max()) / size
    if not error <= _TOLERANCE:
        worst = int((rows - expected).flatten(1).abs().amax(dim=1).argmax())
        raise ValueError(
            f"the rule of {what} is off by {error:.2g} of the largest gradient, most for record "
            f"{worst}; compare it with autograd for that record alone"
        )
    true = expected.flatten(1).square().sum(dim=1)
    squares = found.squares()
    if squares.shape != true.shape or not (squares >= true * (1 - _TOLERANCE)).all():
        raise ValueError(
            f"the rule of {what} gives squared norms {squares.tolist()}, and the gradients have "
            f"{true.tolist()}; norms must be exact or from above, one per record"
        )
    generator = torch.Generator().manual_seed(1)
    scale = torch.rand(len(expected), generator=generator, dtype=torch.float64) + 0.1
    for s in (scale, torch.where(torch.arange(len(scale)) == 0, 0.0, scale)):
        wanted = torch.tensordot(s, expected, dims=1)
        total = found.total(s)
        off = float((total - wanted).abs().max()) if total.shape == wanted.shape else torch.inf
        if not off <= _TOLERANCE * size * len(s):
            raise ValueError(
                f"the rule of {what} gives a scaled sum that is off by {off / size:.2g} of the "
                "largest gradient; total(s) must be the sum of s_i times row i"
            )
    positive = true > 0
    ratios = (squares[positive] / true[positive]).sqrt()
    return error, float(ratios.max()) if len(ratios) else 1.0


def _spoilt(x: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The same, with a first record that is not finite: it must reach no sum."""
    b = b.clone()
    b[0] = torch.nan
    if x.is_floating_point():
        x = x.clone()
        x[0] = torch.inf
    return x, b


def _check_left_out(
    kind: str, found: dict[str, RecordGradients], expected: dict[str, Tensor]
) -> None:
    for name, gradients in found.items():
        rows = expected[name]
        scale = torch.ones(len(rows), dtype=torch.float64)
        scale[0] = 0.0
        off = (gradients.total(scale) - rows[1:].sum(dim=0)).abs().max()
        if not float(off) <= _TOLERANCE * (float(rows.abs().max()) + 1e-300) * len(rows):
            raise ValueError(
                f"in the rule of {name} of {kind}, a record that is not finite reaches the sum "
                "although its scale is 0, or changes another record's row; return plain rows, or "
                "put zeros in the place of such a record"
            )
