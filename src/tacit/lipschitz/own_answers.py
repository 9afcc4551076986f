"""Are a layer's answers for the forward that it has?"""

from __future__ import annotations

from torch import nn

from tacit.lipschitz.refused import Refused

_THREE = ("output_norm", "lipschitz", "gradient_norms")
_COMPOSITE = ("walk_bounds",)


def require_own_answers(module: nn.Module) -> None:
    """Refuse a subclass that has another forward than the layer whose answers it inherits.

    Let F be the class that forward comes from. If a base of F had both a forward and answers, then
    those answers were for that forward. So F, or a class derived from it, must have answers of its
    own, and leave none to such a base. What a base without a forward answers (`Parameterless`) is
    derived from the others and stays.
    """
    kind = type(module)
    if kind.__call__ is not nn.Module.__call__:
        raise Refused("it has a __call__ of its own, which no answer is for; put it into forward")
    order = kind.__mro__
    at = next(i for i, base in enumerate(order) if "forward" in vars(base))
    names = _COMPOSITE if hasattr(kind, "walk_bounds") else _THREE
    earlier = next((b for b in order[at + 1 :] if _has_forward(b) and _answers(b)), None)
    if earlier is None:
        return
    places = [next((i for i, b in enumerate(order) if n in vars(b)), at) for n in names]
    inherited = [i for i in places if i > at]
    if len(inherited) == len(places) or any(_has_forward(order[i]) for i in inherited):
        raise Refused(
            f"{order[at].__name__} has a forward of its own and the answers of "
            f"{earlier.__name__}, which are for another; give it {', '.join(names)} of its own, or "
            "derive it from nn.Module"
        )


def _has_forward(kind: type) -> bool:
    return any("forward" in vars(base) for base in kind.__mro__ if base is not nn.Module)


def _answers(kind: type) -> bool:
    return hasattr(kind, "walk_bounds") or all(hasattr(kind, name) for name in _THREE)
