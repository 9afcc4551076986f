"""Batch clipping: the gradient of a whole mini-set is scaled to a norm of at most C."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from weakref import WeakKeyDictionary

from torch import nn

from tacit.checks.side_effects import contents_of, watched_step
from tacit.data.augmentation import Augmentation
from tacit.engines.book_keeping import PerRecord, planned_pass
from tacit.engines.clipping import CLIP, ClipRule, ClipTask
from tacit.engines.model_check import check_model, sample_records
from tacit.engines.pass_state import PassState
from tacit.errors import MixesRecords
from tacit.losses.record_loss import needs_pre_activations
from tacit.losses.tailored import watched
from tacit.precision import ROWS_AT_ONCE
from tacit.queries.bounded_gradient import Blocks, BoundedGradient, Loss
from tacit.queries.per_sample_clip import ClippedQuery, Frozen, MaxNorm, check_key, mean_norms
from tacit.queries.set_gradients import (
    MeanGradient,
    SetBySet,
    SetEngine,
    SetGradient,
    SetsAsRecords,
    draws_one_set,
    ignoring_too_small_sets,
    require_sets,
    sets_of,
)
from tacit.records import Records
from tacit.sampling.mini_sets import MiniSets
from tacit.sampling.poisson import Poisson
from tacit.sampling.sampler import Batch, batch_of
from tacit.sampling.scheme import Unit
from tacit.statistics.tracking import without_running_statistics

_MOST_KEYS = 64
# Whether a pass under shadow memory proved a model's records apart, by what that depends on.
_apart: WeakKeyDictionary[nn.Module, dict[Hashable, bool]] = WeakKeyDictionary()


class BatchClip(ClippedQuery):
    """Σ_{j ≤ k} [g(w; S_j)]_C over the k mini-sets of a step, s records each  [Nguyen 2023, Eq. 6].

    s = 1 is individual clipping, the same sums as `PerSampleClip`; k = 1 is the paper's batch
    clipping. With BatchNorm each mini-set has a pass of its own, so it sees one set at a time, and
    clipping covers what it does there. Running statistics are not touched: they would be a release.

    Sensitivity. The sum has one term per set. A record that is replaced, added or removed turns
    one term into another, both of norm at most C_h in block h: it moves by at most 2·C_h under
    either relation. (If a record is removed, the term of its set remains. So add-or-remove has the
    factor 2 too, unlike individual clipping under Poisson sampling.) This needs sets by record id,
    which `MiniSetSampler` draws: k of N/s without replacement, exactly C_{m/N}(G_{1/σ})^{⊗T}
    with m = sk; or each with a probability, whose pair is Poisson sampling under replace-one. Sets
    of one record are records, and are bounded and accounted as those.

    Args:
        max_norm, blocks, rule, augmentation, frozen: as for `PerSampleClip`.
        mini_set_size: s, the number of records per mini-set.
        gradient: g, `MeanGradient` by default, or a `LocalRun` of an optimizer.
        engine: `SetBySet` runs each set alone. `SetsAsRecords` takes all sets through the model at
            once, which needs records that stay apart. By default a pass of two records under
            shadow memory decides: all at once if it proves them apart, and set by set if it does
            not (BatchNorm, a branch on a value, an operator without a rule), for a `LocalRun`, and
            if a step draws a single set.

    The step is divided by the expected number of sets.

        query = BatchClip(max_norm=0.5, mini_set_size=8, blocks=by_layer)
        sampler = MiniSetSampler(records, 8, steps=300, chosen=80)
    """

    def __init__(
        self,
        max_norm: MaxNorm,
        mini_set_size: int,
        *,
        blocks: Blocks | Callable[[nn.Module], Blocks] | None = None,
        gradient: SetGradient | None = None,
        rule: ClipRule = CLIP,
        augmentation: Augmentation | None = None,
        engine: SetEngine | None = None,
        frozen: Frozen | None = None,
    ) -> None:
        super().__init__(max_norm, blocks, rule, augmentation, frozen)
        if mini_set_size < 1:
            raise ValueError(f"mini_set_size is {mini_set_size}; give at least 1")
        self.mini_set_size = mini_set_size
        self.gradient: SetGradient = gradient or MeanGradient()
        self.engine = engine
        self._one_by_one, self._at_once = SetBySet(), SetsAsRecords()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(max_norm={self.max_norm!r}, "
            f"mini_set_size={self.mini_set_size}, rule={self.rule!r})"
        )

    @property
    def unit(self) -> Unit:
        return Unit.RECORD if self.mini_set_size == 1 else Unit.MINI_SET

    def expect(self, steps: int) -> None:
        """Do nothing: batch clipping does not choose by the number of steps."""

    def forget(self) -> None:
        """Free the memory of recorded steps."""
        for engine in (self.engine, self._one_by_one, self._at_once):
            getattr(engine, "forget", lambda: None)()

    def __call__(self, model: nn.Module, loss: Loss, batch: Batch) -> BoundedGradient:
        require_sets(batch, self.mini_set_size)
        # The loss may depend on the parameters in any way.
        with watched(model, loss) if needs_pre_activations(loss) else nullcontext():
            blocks = self.blocks_of(model)
            constants = self._constants(model, loss, batch, blocks)
            task = self._task(model, loss, blocks, constants)
            sets = [self._with_views(one) for one in sets_of(batch)]
            with self._running(task, batch, draws_one_set(batch)) as engine:
                limit = min(batch.max_physical or ROWS_AT_ONCE, ROWS_AT_ONCE)
                pieces = _pieces(sets, limit)
                clipped = (engine.clipped_sums(task, self.gradient, piece) for piece in pieces)
                return self._bounded(task, constants, clipped, self._divisor(batch))

    def expected_norms(self, model: nn.Module, loss: Loss, public: Records) -> list[float]:
        size = min(self.mini_set_size, len(public))
        whole = batch_of(
            public.inputs, public.targets, divisor=1.0, scheme=Poisson(1.0), max_physical=size
        )
        sets = [one for one in whole.physical() if len(one) == size]
        task = self._task(model, loss, self.blocks_of(model))
        with self._running(task, whole, "public") as engine:
            pieces = _pieces(sets, max(size, 256))
            return mean_norms([engine.block_norms(task, self.gradient, piece) for piece in pieces])

    @contextmanager
    def _running(self, task: ClipTask, batch: Batch, purpose: Hashable) -> Iterator[SetEngine]:
        """The engine of a step, while the model is watched and keeps no running statistics."""

        def check() -> bool:
            return self._check(task, self._engine_for(task, batch), batch)

        key = purpose, check_key(task, self.engine, self.gradient)
        mean = isinstance(self.gradient, MeanGradient)
        with (
            without_running_statistics(task.model),
            watched_step(task.model, check, key, proved=mean),
        ):
            yield self._engine_for(task, batch)

    def _divisor(self, batch: Batch) -> float:
        """The expected number of sets in a step, from public constants."""
        if isinstance(batch.scheme, MiniSets):
            return batch.scheme.probability * batch.scheme.num_sets
        return batch.divisor

    def _engine_for(self, task: ClipTask, batch: Batch) -> SetEngine:
        """The engine for this task, chosen by public facts alone.

        The sums of two engines differ in their roundings. The proof does not depend on the records'
        values, so it can use any two records.
        """
        if self.engine is not None:
            return self.engine
        mean = isinstance(self.gradient, MeanGradient)
        if draws_one_set(batch) or not mean or len(batch.records) == 0:
            return self._one_by_one
        proved = _apart.setdefault(task.model, {})
        key = check_key(task, self._views.augmentation), contents_of(task.model).settings
        if key not in proved:
            if len(proved) >= _MOST_KEYS:  # hooks that are new in each step
                proved.clear()
            proved[key] = self._keeps_apart(task, batch)
        return self._at_once if proved[key] else self._one_by_one

    def _keeps_apart(self, task: ClipTask, batch: Batch) -> bool:
        """Whether a pass under shadow memory proves that records stay apart in the model."""
        inputs, targets = sample_records(batch, 2)
        start = PassState(inputs, task.model)
        try:
            plan = planned_pass(task, self._views.first(inputs), targets, 2).plan
        finally:
            start.restore()
        return plan.isolation.proves and not plan.alone and not plan.dynamic

    def _check(self, task: ClipTask, engine: SetEngine, batch: Batch) -> bool:
        """Raise unless a set's gradient is of that set alone; see `engines.model_check`."""
        if not isinstance(engine, SetsAsRecords):
            with ignoring_too_small_sets():
                return check_model(task, batch, self._views.first, alone=self.mini_set_size)
            return False
        try:
            alone = int(isinstance(engine.engine, PerRecord))
            return check_model(task, batch, self._views.first, alone=alone)
        except MixesRecords as error:
            self._check(task, self._one_by_one, batch)  # raises if that does not work either
            raise MixesRecords(
                f"SetsAsRecords takes all mini-sets through the model at once, where {error}. "
                "To clip mini-sets as they are, give BatchClip "
                "engine=tacit.queries.SetBySet(), which runs each of them alone"
            ) from error

    def _with_views(self, one: Batch) -> Batch:
        """The set as the model is given it: its views, where it is augmented."""
        if self._views.augmentation is None:
            return one
        (views,) = self._views.of(replace(one, max_physical=None))
        return views


def _pieces(sets: list[Batch], max_physical: int) -> list[list[Batch]]:
    """As many sets as fit the limit; a set is never cut, as its gradient is of the whole."""
    pieces: list[list[Batch]] = []
    rows = 0
    for one in sets:
        if not pieces or rows + len(one) > max_physical:
            pieces.append([])
            rows = 0
        pieces[-1].append(one)
        rows += len(one)
    return pieces
