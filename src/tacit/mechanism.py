"""The Gaussian mechanism over blocks: from a bounded gradient to a pending release.

`Mechanism.privatise` has the query bound a step's gradients and chooses the noise of each block.
The result, a `PendingRelease`, is not private yet: the ledger charges for it and draws the noise.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import Any

import dp_accounting as dpa
import torch
from torch import Tensor, nn

from tacit.accounting.plan import Plan
from tacit.budget import Relation
from tacit.checks.side_effects import parameters_of
from tacit.errors import PlanChanged
from tacit.noise import Allocation, GlobalNoise, joint_noise_multiplier, noise_left
from tacit.queries.bounded_gradient import (
    Adapting,
    BoundedGradient,
    GradientQuery,
    Loss,
    Recording,
    Statistic,
)
from tacit.randomness import ProcessLock, Randomness, Stream, step_draws
from tacit.ranks import Ranks
from tacit.sampling.sampler import Batch, Sampler
from tacit.sampling.scheme import whole_number
from tacit.torch_internals import divide_each, flattened, multiply_each, unflattened

_lock = ProcessLock()  # steps of one mechanism may come from several threads


class PendingRelease:
    """(Σ gradients + N(0, s_h²)) / divisor, drawn once, when the ledger has charged for it.

    The noise is not drawn before the charge is on disk, so a process killed at any moment has
    never drawn more steps than it was charged for. Neither the sum nor a statistic can be read
    without noise; noisy statistics go to the query that asked for them.
    """

    def __init__(
        self,
        plan: Plan,
        bounded: BoundedGradient,
        stds: Sequence[float],
        randomness: Randomness,
        batch: Batch | None = None,
        step: int = 0,
        ranks: Ranks | None = None,
    ) -> None:
        self.plan = plan
        self.drawn = None if batch is None else batch.drawn
        # The public name of the seeded stream that the batch was drawn from, and the place in it.
        self.sampling = None if self.drawn is None else self.drawn.sampling
        self.sampling_step = None if self.drawn is None else self.drawn.step
        # The steps of a shuffled epoch are one event, if the batch is a sampler's own draw.
        self.epoch = None
        if batch is not None and batch.drawn is not None and batch.epoch is not None:
            self.epoch = batch.epoch if plan.scheme.steps_within(1) > 1 else None
        self.stds = tuple(stds)
        self.divisor = bounded.divisor
        self._bounded: BoundedGradient | None = bounded
        self._randomness = randomness
        self._step = step
        self._ranks = ranks

    @property
    def ranks(self) -> Ranks | None:
        """The ranks that each hold a share of the sum."""
        return self._ranks

    def agreed(self) -> list[object]:
        """What must be the same on all ranks before one of them charges. All of it is public."""
        bounded = self._bounded
        if bounded is None:
            return []
        blocks = [
            (block.names, [tuple(p.shape) for p in block.parameters], block.bound, block.factors)
            for block in bounded.blocks
        ]
        statistics = [(one.name, one.bound, one.std) for one in bounded.statistics]
        return [self.plan.to_json(), self.stds, self.divisor, self._step, blocks, statistics]

    def __repr__(self) -> str:
        state = "released" if self._bounded is None else "not charged, noise not drawn"
        return f"PendingRelease(blocks={len(self.stds)}, divisor={self.divisor:g}, {state})"

    def uncovered(self, model: nn.Module) -> list[nn.Parameter]:
        """The parameters of `model` without a gradient here; an error if it is for another model.

        The ledger calls this before it charges.
        """
        return self._uncovered(self._parameters_of(model))

    def _parameters_of(self, model: nn.Module) -> list[nn.Parameter]:
        # `parameters_of` remembers a sharded model as the query saw it, with whole weights.
        return parameters_of(model) if self._ranks is None else list(model.parameters())

    def _uncovered(self, of_model: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        if self._bounded is None:
            raise RuntimeError("this gradient was released already; noise is drawn once")
        if self.drawn is not None and self.drawn.pid != os.getpid():
            raise PlanChanged(
                "this batch was drawn before the process was forked, and both could release it; "
                "draw batches in the process that releases them"
            )
        if self.drawn is not None and self.drawn.released:
            raise PlanChanged(
                "a gradient of this batch was released already, and a second one would be charged "
                "as another draw, which it is not; take the next batch of the sampler"
            )
        own = {id(p): p for p in of_model}
        for block in self._bounded.blocks:
            for parameter in block.parameters:
                if own.pop(id(parameter), None) is None:
                    raise ValueError("the gradient is for another model than the one in `into`")
        return list(own.values())

    def draw_into(self, model: nn.Module, *charge: str | int) -> None:
        """Draw the noise and set `.grad`. Only the ledger calls this, after it has charged.

        `charge` identifies this charge among all that the ledger makes (identity, run, attempt,
        number). The noise is addressed by it and by the mechanism's count of steps. So a seed that
        is used again on a ledger draws different noise: equal noise on two gradients would cancel.
        """
        own = self._parameters_of(model)
        for parameter in self._uncovered(own):
            parameter.grad = None  # a gradient from elsewhere has not been charged
        if self.drawn is not None:
            self.drawn.released = True
        bounded, self._bounded = self._bounded, None
        assert bounded is not None
        address = (*charge, self._step)
        place = {id(parameter): i for i, parameter in enumerate(own)}
        self._release_blocks(bounded, place, self._randomness.stream("noise", *address))
        if bounded.statistics:
            stream = self._randomness.stream("statistics", *address)
            self._release_statistics(bounded.statistics, stream)
        for released in bounded.released:
            released()

    def _release_blocks(
        self, bounded: BoundedGradient, place: Mapping[int, int], stream: Stream
    ) -> None:
        """Noise for all parameters in one draw: a GPU gets a few kernels, not hundreds.

        A parameter's noise is at its place among the model's parameters, which `place` says by
        identity. It is drawn and added in float64, and the sum is rounded once, to the parameter's
        own type.
        """
        by_kind: dict[object, list[tuple[Any, ...]]] = {}  # by device and precision
        for block, std in zip(bounded.blocks, self.stds, strict=True):
            factors = block.factors or (1.0,) * len(block.sums)
            masks = block.active or (None,) * len(block.sums)
            of_block = zip(block.parameters, block.sums, factors, masks, strict=True)
            for parameter, total, factor, mask in of_block:
                kind = total.device, total.dtype, parameter.dtype, type(parameter)
                scale = std, bounded.divisor * factor
                by_kind.setdefault(kind, []).append((parameter, total, mask, scale))
        for parts in by_kind.values():
            self._release_kind(parts, place, stream)

    def _release_kind(
        self, parts: Sequence[tuple[Any, ...]], place: Mapping[int, int], stream: Stream
    ) -> None:
        """The parameters of one device and precision. A rank draws for the parts that it owns."""
        parameters, sums, masks, scales = zip(*parts, strict=True)
        if [total.numel() for total in sums] != [parameter.numel() for parameter in parameters]:
            raise ValueError("a sum of gradients has another size than its parameter")
        ranks, device = self._ranks, sums[0].device
        own = [slice(0, p.numel()) if ranks is None else ranks.part(p) for p in parameters]
        sizes, starts = [part.stop - part.start for part in own], [part.start for part in own]
        flat = stream.flat_normals(sizes, device, [place[id(p)] for p in parameters], starts)
        # Neighbours of equal scale are one piece: of a single block, everything is.
        pieces, stds, divisors = _of_equal_scale(flat, sizes, scales)
        multiply_each(pieces, stds)
        total = flattened(sums) if ranks is None else ranks.sum_of_parts(sums, parameters)
        flat += total.to(flat)
        divide_each(pieces, divisors)
        released = flat.to(device, parameters[0].dtype)
        if ranks is None:
            grads = unflattened(released, parameters)
            for parameter, grad, mask in zip(parameters, grads, masks, strict=True):
                parameter.grad = grad if mask is None else torch.where(mask, grad, 0.0)
            return
        ranks.set_gradients(parameters, released, masks)

    def _release_statistics(self, statistics: Sequence[Statistic], stream: Stream) -> None:
        values = torch.stack([statistic.value for statistic in statistics])
        if self._ranks is not None:
            values = self._ranks.sum(values)
        (drawn,) = stream.normals([len(values)], torch.device("cpu"))
        # The one place that waits for the device: thresholds are plain numbers.
        pairs = zip(statistics, values.tolist(), drawn.tolist(), strict=True)
        for statistic, value, normal in pairs:
            statistic.observe(value + statistic.std * normal)


def _of_equal_scale(
    flat: Tensor, sizes: Sequence[int], scales: Sequence[tuple[float, float]]
) -> tuple[list[Tensor], list[float], list[float]]:
    """The runs of equal (deviation, divisor) in a vector, with the two numbers of each."""
    runs = [
        (scale, sum(size for _, size in run))
        for scale, run in groupby(zip(scales, sizes, strict=True), key=itemgetter(0))
    ]
    stds, divisors = zip(*(scale for scale, _ in runs), strict=True)
    return list(flat.split([size for _, size in runs])), list(stds), list(divisors)


class Mechanism:
    """Adds N(0, s_h²) to block h so that the joint noise multiplier is z, whatever the route.

    The sampler says what is accounted, and batches must come from the same scheme. Statistics
    that a query asks for have noise of their own, fixed beforehand; the blocks get what is left:

        1/z² = Σ_h (Δ_h/s_h)² + Σ_b (Δ_b/s_b)².

    Noise, masks and views come from one secret stream (`tacit.randomness`), whatever
    `torch.manual_seed` was given. Ranks that share the sampler share its key. With a `seed` all of
    them can be repeated by anyone who knows the seed. On one ledger, no two steps ever draw the
    same noise from it.

    One mechanism is one run: a query that adapts starts from its initial state (`query.fresh()`),
    and the given object is not changed.

        mechanism = Mechanism(PerSampleClip(1.0), sampler, noise_multiplier=1.1)
        pending = mechanism.privatise(model, loss, batch)
        ledger.release(pending, into=model)  # charges, draws the noise, sets .grad
    """

    def __init__(
        self,
        query: GradientQuery,
        sampler: Sampler,
        noise_multiplier: float,
        *,
        relation: Relation = Relation.ADD_OR_REMOVE_ONE,
        allocation: Allocation | None = None,
        prelude: tuple[dpa.DpEvent, ...] = (),
        seed: int | None = None,
    ) -> None:
        self.query: GradientQuery = query.fresh() if isinstance(query, Adapting) else query
        self.allocation = allocation or GlobalNoise()
        self.plan = Plan(
            scheme=sampler.scheme,
            noise_multiplier=noise_multiplier,
            relation=relation,
            steps=sampler.steps,
            unit=query.unit,
            prelude=prelude,
        )
        if isinstance(self.query, Recording):
            self.query.expect(sampler.steps)
        self._randomness = Randomness(seed)
        self._ranks = sampler.ranks
        if self._ranks is not None:
            self._randomness.share(self._ranks)
        self._num_steps = 0
        # The standard deviation of the noise in each parameter's released gradient. Public.
        self.noise_of: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"Mechanism({self.query!r}, {self.allocation!r}, {self.plan})"

    def privatise(self, model: nn.Module, loss: Loss, batch: Batch) -> PendingRelease:
        """The pending release of one step: bounded, with its noise chosen and not yet drawn.

        An empty batch is a step like any other: its gradient is noise.
        """
        if batch.scheme != self.plan.scheme:
            raise PlanChanged(
                f"the batch was drawn by {batch.scheme}, and {self.plan.scheme} is accounted for; "
                "make the mechanism with the sampler that draws the batches"
            )
        shares = 1 if self._ranks is None else self._ranks.count
        if batch.drawn is not None and batch.drawn.ranks != shares:
            raise PlanChanged(
                f"the batch is shared by {batch.drawn.ranks} ranks, and this mechanism releases "
                f"for {shares}; call sampler.share(ranks) before the mechanism is made"
            )
        with _lock:
            step, self._num_steps = self._num_steps, self._num_steps + 1
        bounded = self._bounded(model, loss, batch, step)
        if bounded.unit is not self.plan.unit:
            raise PlanChanged(
                f"the query bounds a {bounded.unit}; the plan is for a {self.plan.unit}"
            )
        sensitivities = bounded.sensitivities(self.plan.relation)
        sizes = [block.size for block in bounded.blocks]
        of_statistics = bounded.statistic_sensitivities(self.plan.relation)
        stds_of_statistics = [statistic.std for statistic in bounded.statistics]
        stds = self._allocate(sensitivities, sizes, of_statistics, stds_of_statistics)
        self.noise_of = {
            name: std / bounded.divisor / (1.0 if block.factors is None else block.factors[place])
            for block, std in zip(bounded.blocks, stds, strict=True)
            for place, name in enumerate(block.names)
        }
        return PendingRelease(self.plan, bounded, stds, self._randomness, batch, step, self._ranks)

    def _bounded(self, model: nn.Module, loss: Loss, batch: Batch, step: int) -> BoundedGradient:
        ranks, device = self._ranks, batch.indices.device
        if ranks is None:
            with step_draws(self._randomness, step, device):
                return self.query(model, loss, batch)
        with ranks.gathered(model), step_draws(self._randomness, step, device, ranks.rank):
            bounded = self.query(model, loss, batch)
        # The query has seen whole weights in the places of sharded ones, under the same names.
        own = dict(model.named_parameters(remove_duplicate=False))
        blocks = [
            replace(block, parameters=tuple(own[name] for name in block.names))
            for block in bounded.blocks
        ]
        return replace(bounded, blocks=tuple(blocks))

    def state_dict(self) -> dict[str, int]:
        """Where in the random stream the next step draws. It holds no key."""
        return {"steps": self._num_steps}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._num_steps = whole_number("steps of the mechanism", state["steps"], least=0)

    def _allocate(
        self,
        sensitivities: list[float],
        sizes: list[int],
        of_statistics: list[float],
        stds_of_statistics: list[float],
    ) -> list[float]:
        """The standard deviation of each block's noise, at the planned noise multiplier."""
        z, name = self.plan.noise_multiplier, type(self.allocation).__name__
        left = noise_left(z, joint_noise_multiplier(of_statistics, stds_of_statistics))
        # Tuples, so that the answer is checked against the sensitivities that the query declared.
        stds = [float(s) for s in self.allocation(tuple(sensitivities), tuple(sizes), left)]
        joint = joint_noise_multiplier(
            [*sensitivities, *of_statistics], [*stds, *stds_of_statistics]
        )
        if not joint >= z * (1 - 1e-9):  # written so that NaN is refused too
            raise ValueError(
                f"{name} gives a joint noise multiplier of {joint}, less than the {z} that is "
                "accounted for; see Allocation for the formula"
            )
        if not all(0 <= s < math.inf for s in stds):
            raise ValueError(f"{name} gives {stds}; give finite numbers, 0 or more")
        return stds
