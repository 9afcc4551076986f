"""One recorder for every route: it runs private steps, and captures or compiles those that repeat.

A step is hundreds of small operators, and a GPU finishes each before Python asks for the next. So
the whole step, clipping included, becomes one graph, in up to two stages:

1. *Captured*, on a GPU: the kernels of an eager step as one CUDA graph. This takes about a second.
2. *Compiled*: `make_fx` traces the step into one graph of operators, and Inductor fuses them; on a
   GPU the result is captured in turn. This takes 3 to 60 seconds, so it happens once the steps have
   taken as long as compiling will, or at once if the run has announced enough steps.

Compiled operators round differently, in TensorFloat-32 or bfloat16 by 10⁻³ of a gradient and more.
So one record must not decide how the others' gradients are rounded: whether to compile is decided
when a step begins, from its public number and from time. From then on, batches of every shape are
compiled when they first come.

A recording repeats operators, not Python. It is private if everything that may change is read anew:
records, mask, clipping constants, weights and buffers are its inputs. Lengths or labels read by
Python would be constants of the graph, and models that read any are refused. Settings
of the model are part of the key. What neither sees (a counter, a draw of Python's own) is found by
comparing the recording with an eager step after 1, 2, 4, 8 … replays; then it is dropped.
"""

from __future__ import annotations

import gc
import math
import operator
import time
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.fx.node import map_arg
from torch.nn.functional import pad

from tacit.checks.side_effects import contents_of, current_step
from tacit.engines.clipping import left_to_the_compiler
from tacit.engines.pass_state import PassState
from tacit.precision import float32_settings, full_precision, uses_tensor_float
from tacit.torch_internals import TorchDispatchMode, compile_graph, copy_each, schema_of, swapped

if TYPE_CHECKING:
    from tacit.sampling.sampler import Batch

Outputs = dict[str, Tensor]
Work = Callable[[Sequence[Tensor]], Outputs]
# The largest difference between a recording and the eager step, as a share of the norm. A coarse
# arithmetic such as TensorFloat-32 flips ReLUs (6% were seen) and moves norms by a percent.
_MOST_DIFFERENCE = 2e-2
_MOST_COARSE_DIFFERENCE = 0.2
_LONGEST_STEP = 5.0  # seconds; anything longer is time between steps
_SHAPES_PER_OCTAVE = 16  # sizes of batches that are far from the expected one
_PIECES = 8  # sizes of the last piece of a batch that is cut


@dataclass(frozen=True)
class RecordedStep:
    """A step that can be recorded: a function of some tensors and of a model's weights.

    Args:
        kind: everything public that the step depends on, besides shapes, settings and the model's
            state.
        parameters: those of the model, by the names that `work` knows them by.
        batch: everything that changes from step to step. A Python number would be recorded for
            good (see `constants_on`).
        work: from parameters and batch to the outputs.
        settings: what the loss computes with; where it changes, the step is recorded anew.
        structure: of the records that the batch's tensors are parts of.
    """

    model: nn.Module
    kind: Hashable
    parameters: Mapping[str, nn.Parameter]
    batch: Sequence[Tensor]
    work: Callable[[Mapping[str, Tensor], Sequence[Tensor]], Outputs]
    settings: Hashable = None
    structure: Hashable = None

    def run(self, batch: Sequence[Tensor]) -> Outputs:
        return self.work(self.parameters, batch)

    def run_with(self, weights: dict[str, Tensor], batch: Sequence[Tensor]) -> Outputs:
        """The same, with other tensors in place of the model's parameters and buffers."""
        own = {id(p): name for name, p in self.model.named_parameters()}
        parameters = {name: weights[own[id(p)]] for name, p in self.parameters.items()}
        with swapped(self.model, weights):
            return self.work(parameters, batch)


def constants_on(device: torch.device, numbers: Sequence[float | Tensor]) -> Tensor:
    """Numbers that may change from step to step, as one input of a recorded step."""
    constants = torch.tensor([float(number) for number in numbers], dtype=torch.float64)
    if device.type == "cuda":
        constants = constants.pin_memory().to(device, non_blocking=True)
    return constants


@dataclass
class _Recording:
    """One shape of one step: how often it ran, and its recorded form."""

    step: RecordedStep  # kept alive, so that no other objects get the ids in its key
    is_changed: bool  # the model's settings were others when its shape came first
    calls: int = 0
    replay: Work | None = None
    traced: Work | None = None
    compiled: bool = False
    state: Hashable = None  # of the model, when it was recorded
    failed: set[str] = field(default_factory=set)
    replays: int = 0
    operators: int = 0  # that the eager step runs


@dataclass
class _Progress:
    """The steps of one kind, of any shape, and whether they are compiled."""

    running: object | None = None
    began: float = 0.0
    steps: int = 0
    seconds: float = 0.0
    operators: int = 0
    compiling: bool = False


class _Count(TorchDispatchMode):
    """Counts operators, of the backward pass too."""

    operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
        return func(*args, **(kwargs or {}))


class Recorder:
    """Runs steps, and records those that repeat. The outputs are valid until the next call.

    Args:
        capture: whether steps on a GPU may be captured as CUDA graphs.
        compile: whether steps may be compiled.
        after: how often a step runs eagerly before either.

        PerSampleClip(1.0, engine=Automatic(Recorder(compile=False)))
    """

    def __init__(self, *, capture: bool = True, compile: bool = True, after: int = 2) -> None:
        self.capture = capture
        self.compile = compile
        self.after = after
        self.steps_left: int | None = None
        self._recordings: dict[Hashable, _Recording] = {}
        self._progress: dict[tuple[Hashable, int], _Progress] = {}
        self._latest: Any = None  # the CUDA graph captured last

    def __repr__(self) -> str:
        return f"Recorder(capture={self.capture}, compile={self.compile}, after={self.after})"

    def expect(self, steps: int) -> None:
        """Announce how many steps are still to come, so that long runs compile at once."""
        self.steps_left = steps

    def captures(self, device: torch.device) -> bool:
        """Whether steps on this device are captured, so that batches are worth padding."""
        return self.capture and device.type == "cuda"

    @property
    def num_recorded(self) -> int:
        """How many steps are replayed instead of run: one for each shape and kind of step."""
        return sum(recording.replay is not None for recording in self._recordings.values())

    def forget(self) -> None:
        """Free the recordings' memory; later steps are recorded again."""
        self._recordings.clear()
        self._progress.clear()
        self._latest = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy makes its own recordings: they are of one model's tensors."""
        return vars(self) | {"_recordings": {}, "_progress": {}, "_latest": None}

    def wants(self, kind: Hashable, model: nn.Module) -> bool:
        """Whether a step of this kind should run here although it has just run to be planned.

        So it is if steps are compiled, or if it is not known yet what compiling would cost.
        """
        progress = self._progress.get((kind, id(model)))
        return progress is not None and (progress.compiling or not progress.operators)

    def __call__(self, step: RecordedStep) -> Outputs:
        device = step.batch[0].device
        progress = self._begun(step.kind, step.model, device)
        shapes = tuple((tuple(t.shape), t.dtype) for t in step.batch)
        key = step.kind, id(step.model), shapes, step.structure
        recording = self._recordings.get(key)
        replayed = recording is not None and recording.replay is not None
        if recording is None or (replayed and recording.state != _state(step, device)):
            is_changed = recording is not None
            recording = self._recordings[key] = _Recording(replace(step, batch=()), is_changed)
        recording.calls += 1
        # A setting that changes from step to step would be compiled in each.
        settled = recording.calls > self.after or not recording.is_changed
        can_compile = not recording.compiled and "compile" not in recording.failed
        if progress.compiling and settled and can_compile:
            self._record(recording, step, "compile")
        elif self.captures(device) and recording.replay is None and recording.calls > self.after:
            self._record(recording, step, "capture")
        outputs = self._run(recording, step)
        progress.operators = max(progress.operators, recording.operators)
        return outputs

    def begin(self, kind: Hashable, model: nn.Module, device: torch.device) -> None:
        """Note that a step of this kind runs, where some of its pieces may run unrecorded."""
        if current_step(model) is not None:
            self._begun(kind, model, device)

    def _begun(self, kind: Hashable, model: nn.Module, device: torch.device) -> _Progress:
        """The steps of this kind, with a new one if it begins now.

        It is decided here whether they are compiled from now on. Outside of a query's steps, every
        call is a step.
        """
        progress = self._progress.setdefault((kind, id(model)), _Progress())
        running = current_step(model)
        if running is None or running is not progress.running:
            now = time.perf_counter()
            if progress.steps:  # the time from step to step, since nothing waits for a GPU's work
                progress.seconds += min(now - progress.began, _LONGEST_STEP)
            progress.compiling = progress.compiling or self._worth_compiling(progress, device)
            progress.running, progress.began, progress.steps = running, now, progress.steps + 1
        return progress

    def _run(self, recording: _Recording, step: RecordedStep) -> Outputs:
        batch = step.batch
        if recording.replay is None:
            if recording.operators:
                return step.run(batch)
            with _Count() as count:
                outputs = step.run(batch)
            recording.operators = count.operators
            return outputs
        recording.replays += 1
        if recording.replays & (recording.replays - 1) or recording.replays > 2**20:
            return recording.replay(batch)
        start = PassState(batch, step.model)
        expected = {name: t.clone() for name, t in step.run(batch).items()}
        # Inductor draws other random numbers than an eager pass; the traced graph draws the same.
        check = recording.traced if start.drew() and recording.traced else recording.replay
        start.restore()
        difference = _difference(expected, check(batch))
        coarse = _rounds_coarsely(step.model, batch[0].device)
        if not difference <= (_MOST_COARSE_DIFFERENCE if coarse else _MOST_DIFFERENCE):
            recording.replay = recording.traced = None
            recording.failed |= {"compile", "capture"}
            warnings.warn(
                f"a recorded step of {type(step.model).__name__} differs from the model's own step "
                f"by {difference:.1%}, so the model runs unrecorded from now on. Does its forward "
                "pass count its calls, or draw from its own generator?",
                stacklevel=4,
            )
            return expected
        start.restore()
        return recording.replay(batch)

    def _worth_compiling(self, progress: _Progress, device: torch.device) -> bool:
        if not self.compile or progress.steps < max(1, self.after) or not progress.operators:
            return False
        cost = compile_cost(progress.operators, device)
        if self.steps_left is None:
            return progress.seconds > cost
        return progress.seconds / progress.steps * self.steps_left > 3 * cost

    def _record(self, recording: _Recording, step: RecordedStep, how: str) -> None:
        """Compile or capture the step; where that fails, say so once and leave it as it is."""
        if how in recording.failed:
            return
        batch = step.batch
        start = PassState(batch, step.model)
        try:
            if how == "compile":
                recording.traced, compiled = compile_step(step)
                recording.replay = self._captured(compiled, batch) if batch[0].is_cuda else compiled
                recording.compiled = True
            else:
                recording.replay = self._captured(step.run, batch)
            recording.state = _state(step, batch[0].device)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            recording.failed.add(how)
            kind = type(step.model).__name__
            done = "compiled" if how == "compile" else "captured as a CUDA graph"
            why = f"cannot be {done} and runs without that: {_summary(error)}"
            warnings.warn(f"a step of {kind} {why}", stacklevel=4)
        finally:
            start.restore()

    def _captured(self, work: Work, batch: Sequence[Tensor]) -> Work:
        inputs = [t.clone() for t in batch]
        # Recordings take turns, so they may share their memory. It lives as long as a graph that
        # uses it, and a recording that is made anew has dropped its own.
        pool = None if self._latest is None else self._latest.pool()
        graph, outputs = capture(lambda: work(inputs), pool=pool)
        self._latest = graph

        def replay(batch: Sequence[Tensor]) -> Outputs:
            copy_each(inputs, list(batch))
            graph.replay()
            return outputs

        return replay


def rows_for(piece: Batch, views: int = 1) -> int:
    """The smallest of a few sizes that holds the piece, in rows of whole records.

    Every size is planned and compiled once. A batch of about the expected size B gets one of three:
    B, B + 1.5·√B or B + 4·√B. A Poisson batch needs them in 50, 43 and 7% of all steps, so padding
    is 6% of B at B = 256 and 3% at 1,024. Where a batch is cut, the last piece has one of eight
    sizes; other batches have sixteen per octave.
    """
    records, expected, most = math.ceil(len(piece) / views), piece.divisor, piece.max_physical
    if most is not None and len(piece) <= most < expected * views:
        part = views * math.ceil(most / (_PIECES * views))
        return min(part * math.ceil(len(piece) / part), most)
    sizes = [math.ceil(expected + k * math.sqrt(expected)) for k in (0.0, 1.5, 4.0)]
    size = next((size for size in sizes if records <= size <= 2 * records), 0)
    if size == 0 or expected < _SHAPES_PER_OCTAVE:
        grid = max(1, 2 ** (records.bit_length() - 1) // _SHAPES_PER_OCTAVE)
        size = grid * math.ceil(records / grid)
    rows = views * size
    return rows if most is None else min(rows, max(most, len(piece)))


def padded(piece: Batch, views: int = 1) -> Batch:
    """The same records, with the dataset's first one in rows that fill up and are masked out."""
    records, rows = len(piece), rows_for(piece, views)
    if rows == records:
        return piece
    place = torch.arange(rows, device=piece.indices.device)
    indices = pad(piece.indices, (0, rows - records))
    return replace(piece, indices=indices, mask=place < records, groups=None)


def _summary(error: Exception) -> str:
    """The first line of an error, and the last, in which a compiler's process names the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " … ".join(dict.fromkeys((lines[:1] + lines[-1:]) or [type(error).__name__]))


def compile_cost(operators: int, device: torch.device) -> float:
    """The seconds that compiling a step takes, within a factor of two or three.

    On two cores 170 operators (three linear layers) took 3 s, 1,200 (a small BERT) 15 s, 2,100
    (ResNet-18) 43 s and, beside other work, 3,400 (an LSTM over 64 tokens) 170 s.
    """
    return 3.0 + 0.015 * operators if device.type == "cuda" else 2.0 + 0.025 * operators


def compile_step(step: RecordedStep) -> tuple[Work, Work]:
    """(the step as one graph of operators, the same graph compiled by Inductor)."""
    from torch.fx.experimental.proxy_tensor import make_fx  # slow to import, and rarely needed

    def weights() -> dict[str, Tensor]:
        return dict(step.model.named_parameters()) | dict(step.model.named_buffers())

    names, order = list(weights()), list[str]()
    # What a step's watch knows already, unless the model lists its weights in its own way.
    known = contents_of(step.model).tensors()
    is_known = all(known.get(name) is weight for name, weight in weights().items())

    def current() -> list[Tensor]:
        now: Mapping[str, Tensor] = contents_of(step.model).tensors() if is_known else weights()
        return [now[name].detach() for name in names]

    def work(*tensors: Tensor) -> list[Tensor]:
        given = dict(zip(names, tensors, strict=False))
        outputs = step.run_with(given, tensors[len(names) :])
        order[:] = outputs
        return list(outputs.values())

    example = [t.clone() for t in step.batch]
    with left_to_the_compiler():
        graph = make_fx(work)(*weights().values(), *example)
    _without_detours(graph)
    move_constants(graph, example[0].device)
    with torch.no_grad(), full_precision(example[0].device):
        compiled_graph = compile_graph(graph, [*current(), *example])

    def traced(tensors: Sequence[Tensor]) -> Outputs:
        with torch.no_grad():
            return dict(zip(order, graph(*current(), *tensors), strict=True))

    def compiled(tensors: Sequence[Tensor]) -> Outputs:
        with torch.no_grad(), full_precision(example[0].device):
            return dict(zip(order, compiled_graph(*current(), *tensors), strict=True))

    compiled(example)
    return traced, compiled


def _without_detours(graph: Any) -> None:
    """Drop operators that nothing uses, and those that return their operand itself.

    A compiler may lay tensors out in another way, in which a traced view is impossible. So a view
    becomes a reshape, unless something is written through it.
    """
    written = _written(graph)
    for node in list(graph.graph.nodes):
        if node.target in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            node.replace_all_uses_with(node.args[0])
        elif node.target is torch.ops.aten.view.default and _origin(node) not in written:
            node.target = torch.ops.aten.reshape.default
    graph.graph.eliminate_dead_code()
    graph.recompile()


def move_constants(graph: Any, device: torch.device) -> None:
    """Compute constants that a step makes on the CPU once, and keep them on the step's device.

    `mask[1:3] = 2` and `torch.arange(n)` make such constants in every pass, and a CUDA graph cannot
    contain a copy from the CPU.
    """
    if device.type == "cpu":
        return
    written = _written(graph)
    known: dict[Any, Tensor] = {}
    for node in graph.graph.nodes:
        if node in written:
            continue
        if node.op == "get_attr":
            value = getattr(graph, node.target)
        elif node.op == "call_function" and _is_constant(node, known):
            value = node.target(*map_arg(node.args, known.get), **node.kwargs)
        else:
            continue
        if isinstance(value, Tensor) and value.device.type == "cpu":
            known[node] = value
    for node, value in known.items():
        users = [u for u in node.users if u not in known and _device_of(u) == device.type]
        if users:
            name = f"_constant_{node.name}"
            graph.register_buffer(name, value.to(device))
            with graph.graph.inserting_after(node):
                moved = graph.graph.get_attr(name)
            for user in users:
                user.replace_input_with(node, moved)
    graph.graph.eliminate_dead_code()
    graph.recompile()


def _is_constant(node: Any, known: dict[Any, Tensor]) -> bool:
    """Whether an operator's result is the same in every step: it draws and writes nothing."""
    schema = schema_of(node.target)
    if schema is None or schema.is_mutable or any(n not in known for n in node.all_input_nodes):
        return False
    return torch.Tag.nondeterministic_seeded not in node.target.tags and _device_of(node) == "cpu"


def _device_of(node: Any) -> str | None:
    value = node.meta.get("val")
    return value.device.type if isinstance(value, Tensor) else None


def _written(graph: Any) -> set[Any]:
    """The tensors of a graph that some operator writes to, also through views."""
    return {
        _origin(operand)
        for node in graph.graph.nodes
        if (schema := schema_of(node.target)) is not None
        for argument, operand in zip(schema.arguments, node.args, strict=False)
        if argument.is_write
    }


def _origin(node: Any) -> Any:
    """The tensor that a chain of views shows."""
    while getattr(node.target, "is_view", False) or node.target is operator.getitem:
        node = node.args[0]
    return node


def capture(
    work: Callable[[], Any], warm_ups: int = 2, pool: Any = None
) -> tuple[torch.cuda.CUDAGraph, Any]:
    """The CUDA graph of `work`, and its result: tensors that each replay overwrites.

    `work` must read and write the same tensors each time and wait for nothing. It runs `warm_ups`
    times first, on its own stream, so that libraries are ready. Nodes of autograd's graph that were
    made on another stream cannot be recorded, so those of earlier passes and of autocast's cache
    are cleared first.
    """
    gc.collect()
    cached = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(side):
            for _ in range(warm_ups):
                work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=pool):
                outputs = work()
        except Exception:
            _usable_generator()
            raise
        return graph, outputs
    finally:
        torch.set_autocast_cache_enabled(cached)


def _usable_generator() -> None:
    """Give the generator a new state, since a failed recording leaves it waiting for its end.

    The new state is far ahead of the old one, from which earlier recordings still draw.
    """
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.graphsafe_set_state(generator.clone_state())
    generator.set_offset(generator.get_offset() + 2**40)


def _state(step: RecordedStep, device: torch.device) -> Hashable:
    return step.settings, model_state(step.model, device)


def model_state(model: nn.Module, device: torch.device) -> Hashable:
    """What a recording depends on: the tensors' addresses, the modules' settings, the arithmetic.

    A setting that a module computes with (a dropout rate, a scale, its mode) is a constant of the
    recording, so another value needs another recording. Checked before every replay.
    """
    casts = torch.is_autocast_enabled(device.type)
    cast = torch.get_autocast_dtype(device.type) if casts else None
    return contents_of(model).recorded_state(), float32_settings(), cast


def _rounds_coarsely(model: nn.Module, device: torch.device) -> bool:
    """Whether any part of a step is less precise than float32."""
    narrow = any(p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters())
    cuts = uses_tensor_float("matmul", device) or uses_tensor_float("convolution", device)
    return narrow or cuts or torch.is_autocast_enabled(device.type)


def _difference(expected: Outputs, replayed: Outputs) -> float:
    """The distance between two results, as a share of their norm."""
    if set(replayed) != set(expected):
        return math.inf
    names = [n for n, t in expected.items() if t.is_floating_point()]
    scale = sum(float(expected[n].double().square().sum()) for n in names) ** 0.5
    gaps = [expected[n].double() - replayed[n].double() for n in names]
    return sum(float(gap.square().sum()) for gap in gaps) ** 0.5 / (scale + 1e-12)
