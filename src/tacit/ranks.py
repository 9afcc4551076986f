"""Several processes that train one model together: the same run on one rank or on many.

A step on R ranks is the step on one, cut in two places:

1. Every rank draws the rows of the whole step, from one secret, and keeps its share of them
   (`share_of`). Its query bounds and sums that share alone, without talking to anybody.
2. Every rank owns a part of each parameter (`Ranks.part`). It gets the other ranks' sums of that
   part, adds them in float64 in the order of ranks, and draws the noise of that part. The noise of
   number i of a parameter has an address of its own (`tacit.randomness`), so it is the same number
   whoever draws it, and nobody draws it twice. Of a sharded parameter a rank keeps its part. Of any
   other, all parts are put together on all ranks, so that all have the same bits.

**Why this is as private as one rank.** What is released is Σ_r Σ_{i in share r} s_i·g_i plus the
noise. The shares are a partition of the step's rows: a record's own id says whose it is. So the sum
has the same terms as on one rank, and one record moves one share, by at most its bound. The scale
s_i depends on the record's own whole gradient, which one rank computes.

No collective operation is in the part that depends on records, and every rank is given the same
number of rows, padding included. So an empty share or a slow rank cannot make the others hang, and
their messages have sizes that depend on the model alone.

**Sharded models** (`torch.distributed.fsdp.fully_shard`, or parameters that are DTensors) keep
their weights, gradients and the optimizer's state in parts, on the CPU where FSDP2's
`CPUOffloadPolicy` says so. For the step itself each rank puts the weights together on its device
(`Ranks.gathered`), so the model must fit there. A gradient is then of the
whole model, and no norm needs to be added up across ranks.

The ranks trust each other: the secret of the random stream and the sums without noise pass between
them. Run them on machines and a network of your own.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from tacit import errors
from tacit.torch_internals import (
    require_plain_sharding,
    sharded_like,
    tables_of,
    version_of,
    without_sharding_hooks,
)

T = TypeVar("T")


def share_of(
    rows: np.ndarray, sets: np.ndarray | None, ids: np.ndarray, rank: int, count: int
) -> tuple[np.ndarray, np.ndarray | None, int]:
    """This rank's rows of a step, their mini-sets, and the most rows that any rank has.

    A record belongs to the rank that its id says, whoever else is drawn, and a mini-set to the one
    that its number says. `ids` are those of all rows of the dataset. Ids are scattered first
    (multiplied by 2⁶⁴/φ), so that ids that are all even still give two ranks a half each.
    """
    whose = ids[rows] if sets is None else sets
    scattered = whose.astype(np.int64).view(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    owner = ((scattered >> np.uint64(32)) % np.uint64(count)).astype(np.int64)
    own = owner == rank
    most = int(np.bincount(owner, minlength=count).max(initial=0))
    return rows[own], None if sets is None else sets[own], most


class Ranks:
    """The processes of a one-dimensional `DeviceMesh`, and what they exchange.

    All ranks must make the same calls in the same order, as with any collective operation.

        mesh = init_device_mesh("cuda", (world_size,))
        trainer = tacit.Trainer(..., mesh=mesh)
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        if mesh.ndim != 1:
            raise ValueError(
                f"the mesh has {mesh.ndim} dimensions, {mesh.mesh_dim_names}; give one dimension: "
                "replicated and sharded training both use all ranks for records"
            )
        self.mesh = mesh
        self.group = mesh.get_group()
        self.rank: int = mesh.get_local_rank()
        self.count: int = mesh.size()
        # Answers of the first rank do not wait for what is queued on a GPU.
        members = dist.get_process_group_ranks(self.group)
        on_cpu = mesh.device_type == "cpu" or self.count == 1
        self._answers = self.group if on_cpu else dist.new_group(members, backend="gloo")
        self._asked = 0  # values that the first rank was asked for
        self._depths: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
        self._known_cuts: dict[Hashable, _Cuts] = {}
        self._whole: WeakKeyDictionary[nn.Module, _WholeWeights] = WeakKeyDictionary()

    def __repr__(self) -> str:
        return f"Ranks(rank {self.rank} of {self.count})"

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    # ---- values --------------------------------------------------------------------------------

    def from_first(self, value: T, what: str = "a value") -> T:
        """The first rank's value, on all ranks.

        Each message says what it is. A rank that waits for something else is at another place of
        the program, and must not take it for what it is not.
        """
        self._asked += 1
        if self.count == 1:
            return value
        asked = self._asked, what
        box = [(asked, value) if self.is_first else None]
        dist.broadcast_object_list(box, group_src=0, group=self._answers)
        assert box[0] is not None
        told, answer = box[0]
        if told != asked:
            raise RuntimeError(
                f"the ranks are at different places: this one waits for {what}, and the first one "
                f"sends {told[1]}; all of them must make the same calls in the same order"
            )
        return answer

    def on_first(self, call: Callable[[], T], what: str = "a value") -> T:
        """Run this on the first rank; all ranks get its result, or its error."""
        result, raised = None, None
        if self.is_first:
            try:
                result = call()
            except Exception as error:
                raised = error
        told = None if raised is None else (type(raised).__name__, str(raised))
        result, told = self.from_first((result, told), what)
        if told is not None:
            raise raised or _raised_elsewhere(*told)
        return result  # type: ignore[return-value]

    def require_same(self, facts: object, what: str) -> None:
        """Raise ValueError on every rank unless all of them give the same facts, by their repr."""
        if self.count == 1:
            return
        told = re.sub(r" at 0x[0-9a-f]+", "", repr(facts))  # where an object lies
        digest = hashlib.blake2b(told.encode(), digest_size=16).digest()
        own = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        every = [torch.empty_like(own) for _ in range(self.count)]
        dist.all_gather(every, own, group=self._answers)
        if not all(torch.equal(one, own) for one in every):
            raise ValueError(
                f"the ranks differ in {what}; every rank must be given the same, and takes its "
                "share by itself"
            )

    def any(self, *flags: bool) -> list[bool]:
        """Whether each flag is set on any rank."""
        given = torch.tensor([int(flag) for flag in flags])
        if self.count > 1:
            dist.all_reduce(given, dist.ReduceOp.MAX, group=self._answers)
        return [bool(flag) for flag in given.tolist()]

    def sum(self, values: Tensor) -> Tensor:
        """Σ over ranks in float64, with the same bits on all of them."""
        own = values.to(self.device, torch.float64)
        return self._from_all(own.reshape(-1)).sum(dim=0).view(own.shape).to(values.device)

    def _from_all(self, own: Tensor) -> Tensor:
        """The vectors of all ranks, which have one length, in the order of ranks."""
        if self.count == 1:
            return own.unsqueeze(0)
        every = own.new_empty(self.count, len(own))
        dist.all_gather(list(every.unbind()), own, group=self.group)
        return every

    @property
    def device(self) -> torch.device:
        """Where steps run. Parts of sharded weights may be kept on the CPU (CPUOffloadPolicy)."""
        kind = self.mesh.device_type
        return (
            torch.device(kind, torch.cuda.current_device())
            if kind == "cuda"
            else torch.device(kind)
        )

    # ---- parts of parameters -------------------------------------------------------------------

    def part(self, parameter: Tensor, rank: int | None = None) -> slice:
        """The numbers of a flattened parameter that a rank owns (this rank, if none is given)."""
        rank = self.rank if rank is None else rank
        size, row = parameter.numel(), 1
        if isinstance(parameter, DTensor):
            row = size // max(1, len(parameter))  # sharded by rows, as torch.chunk cuts them
        each = math.ceil(size // row / self.count) * row if row else 0
        return slice(min(rank * each, size), min((rank + 1) * each, size))

    def sum_of_parts(self, sums: Sequence[Tensor], like: Sequence[Tensor]) -> Tensor:
        """This rank's part of each sum, end to end, added up over all ranks in float64."""
        flat = torch.cat([total.detach().reshape(-1) for total in sums])
        if self.count == 1:
            return flat.double()
        cuts = self._cuts(like)
        size = cuts.of_rank[self.rank]  # 0 for a rank that owns no row
        received = flat.new_empty(self.count * size)
        dist.all_to_all_single(
            received,
            cuts.by_rank(flat),
            output_split_sizes=[size] * self.count,
            input_split_sizes=list(cuts.of_rank),
            group=self.group,
        )
        return received.view(self.count, size).sum(dim=0, dtype=torch.float64)

    def together(self, own: Tensor, like: Sequence[Tensor]) -> Tensor:
        """Flattened parameters, end to end, put together from the parts of all ranks."""
        if self.count == 1:
            return own
        cuts = self._cuts(like)
        longest = max(cuts.of_rank)
        own = torch.cat([own, own.new_zeros(longest - len(own))])  # of one size on every rank
        return cuts.by_parameter(self._from_all(own))

    def _cuts(self, like: Sequence[Tensor]) -> _Cuts:
        key = tuple((p.shape, isinstance(p, DTensor)) for p in like)
        if key not in self._known_cuts:
            parts = [[self.part(p, rank) for p in like] for rank in range(self.count)]
            self._known_cuts[key] = _Cuts([[p.stop - p.start for p in of] for of in parts])
        return self._known_cuts[key]

    def set_gradients(
        self,
        parameters: Sequence[nn.Parameter],
        released: Tensor,
        masks: Sequence[Tensor | None],
    ) -> None:
        """Hand released parts to `.grad`: of sharded parameters their own, else all of them.

        Either all of the parameters are sharded, or none is.
        """
        own = [slice(0, p.numel()) for p in parameters]
        if isinstance(parameters[0], DTensor):
            own = [self.part(p) for p in parameters]
        else:
            released = self.together(released, parameters)
        pieces = released.split([part.stop - part.start for part in own])
        for p, piece, mask, part in zip(parameters, pieces, masks, own, strict=True):
            if mask is not None:
                piece = torch.where(mask.reshape(-1)[part], piece, 0.0)
            if isinstance(p, DTensor):
                p.grad = sharded_like(p, piece)
            else:
                p.grad = piece.view(p.shape)

    # ---- models --------------------------------------------------------------------------------

    def begin(self, model: nn.Module) -> None:
        """Give all ranks the first rank's weights and buffers, where they are not sharded."""
        shared = [t for t in (*model.parameters(), *model.buffers()) if not isinstance(t, DTensor)]
        with torch.no_grad():
            for tensor in shared:
                held = tensor.detach().to(self.device).contiguous()
                dist.broadcast(held, group_src=0, group=self.group)
                tensor.copy_(held)
        self._weights_of(model)

    @contextmanager
    def gathered(self, model: nn.Module) -> Iterator[None]:
        """Inside, a sharded model has whole weights and runs without talking to other ranks.

        Changes to trainable weights are written back to each rank's part at the end.
        """
        weights = self._weights_of(model)
        depth = self._depths.get(model, 0)
        if not weights.sharded or depth:
            yield
            return
        weights.gather(self)
        self._depths[model] = 1
        try:
            with weights.in_place(), without_sharding_hooks(model):
                yield
        finally:
            self._depths[model] = 0
        weights.write_back(self)

    def shards(self, model: nn.Module) -> bool:
        """Whether the model keeps its weights in parts."""
        return bool(self._weights_of(model).sharded)

    def _weights_of(self, model: nn.Module) -> _WholeWeights:
        if model not in self._whole:
            self._whole[model] = _WholeWeights(model, self)
        return self._whole[model]

    def whole(self, state: Any) -> Any:
        """The same tree of lists, tuples and dicts with whole tensors where it has sharded ones."""
        if isinstance(state, DTensor):
            own = state.to_local().detach().to(self.device)
            return self.together(own.reshape(-1), [state]).view(state.shape)
        if isinstance(state, dict):
            return {key: self.whole(value) for key, value in state.items()}
        if isinstance(state, list | tuple):
            return type(state)(self.whole(value) for value in state)
        return state

    def shared_out(self, state: Any, like: Any, model: nn.Module | None = None) -> Any:
        """The tree with whole tensors cut to this rank's part, where `like` has sharded ones.

        Where `like` has nothing yet, a tensor under a parameter's name is cut as the parameter is.
        """
        if isinstance(like, DTensor) and isinstance(state, Tensor):
            return sharded_like(like, state.reshape(-1)[self.part(like)])
        if isinstance(state, dict):
            named = {} if model is None else dict(model.named_parameters())
            found = like if isinstance(like, dict) else {}
            return {
                key: self.shared_out(value, found.get(key, named.get(key)), model)
                for key, value in state.items()
            }
        if isinstance(like, list | tuple) and isinstance(state, list | tuple):
            pairs = zip(state, like, strict=True)
            return type(state)(self.shared_out(value, other, model) for value, other in pairs)
        return state

    def optimizer_state(self, optimizer: torch.optim.Optimizer, state: Any) -> Any:
        """The same for an optimizer, whose tensors have the shapes of its parameters."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        of_parameter = {
            number: {
                key: self.shared_out(value, parameters[number])
                if isinstance(value, Tensor) and value.shape == parameters[number].shape
                else value
                for key, value in entries.items()
            }
            for number, entries in state["state"].items()
        }
        return {**state, "state": of_parameter}


def _raised_elsewhere(name: str, message: str) -> Exception:
    """An error of the first rank, on another one: Tacit's own kinds and two of Python's."""
    own = getattr(errors, name, None)
    if isinstance(own, type) and issubclass(own, Exception):
        return own(message)
    kinds: dict[str, type[Exception]] = {"ValueError": ValueError, "TypeError": TypeError}
    return kinds.get(name, RuntimeError)(message)


class _WholeWeights:
    """Whole parameters in the places of sharded ones. They stay the same objects in every step."""

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        require_plain_sharding(model)
        self.sharded: list[DTensor] = []
        self._places: list[tuple[dict[str, Any], str, DTensor]] = []
        self._gathered: dict[int, int] = {}  # versions of the parts that were gathered last
        self._written: dict[int, int] = {}  # and of the whole weights since then
        for module in model.modules():
            table = tables_of(module).parameters
            for name, parameter in table.items():
                if isinstance(parameter, DTensor):
                    self._places.append((table, name, parameter))
        self.sharded = list({id(p): p for _, _, p in self._places}.values())
        for sharded in self.sharded:
            if sharded.device_mesh != ranks.mesh or sharded.placements != (Shard(0),):
                raise ValueError(
                    f"a parameter of shape {tuple(sharded.shape)} is {sharded.placements} on "
                    f"{sharded.device_mesh}; shard models by rows, on the mesh that the trainer "
                    "is given: fully_shard(model, mesh=mesh)"
                )
        kinds = {p.to_local().device.type for p in self.sharded}
        # The parts of one rank are the whole weights, in one memory unless they are offloaded.
        self._is_alone = ranks.count == 1 and kinds <= {ranks.mesh.device_type}
        self._whole = {
            id(p): nn.Parameter(
                p.to_local().detach()
                if self._is_alone
                else torch.empty(p.shape, dtype=p.dtype, device=ranks.device),
                requires_grad=p.requires_grad,
            )
            for p in self.sharded
        }

    def gather(self, ranks: Ranks) -> None:
        """Fill the whole weights. Frozen ones are sent again only when they have changed."""
        kinds: dict[torch.dtype, list[DTensor]] = {}
        for parameter in self.sharded:
            self._whole[id(parameter)].requires_grad_(parameter.requires_grad)
            if self._is_alone:
                continue
            version = version_of(parameter.to_local())
            if parameter.requires_grad or self._gathered.get(id(parameter)) != version:
                kinds.setdefault(parameter.dtype, []).append(parameter)
                self._gathered[id(parameter)] = version
        with torch.no_grad():
            for due in kinds.values():
                parts = [p.to_local().detach().to(ranks.device) for p in due]
                own = torch.cat([part.reshape(-1) for part in parts])
                flat = ranks.together(own, due).split([p.numel() for p in due])
                for parameter, values in zip(due, flat, strict=True):
                    whole = self._whole[id(parameter)]
                    whole.copy_(values.view(parameter.shape))
                    self._written[id(parameter)] = version_of(whole)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        try:
            for table, name, parameter in self._places:
                table[name] = self._whole[id(parameter)]
            yield
        finally:
            for table, name, parameter in self._places:
                table[name] = parameter

    def write_back(self, ranks: Ranks) -> None:
        """Frozen weights are written only if they were changed, by a checkpoint for example."""
        if self._is_alone:
            return
        with torch.no_grad():
            for parameter in self.sharded:
                whole, local = self._whole[id(parameter)], parameter.to_local()
                if not parameter.requires_grad and self._written[id(parameter)] == version_of(
                    whole
                ):
                    continue
                local.copy_(whole.reshape(-1)[ranks.part(parameter)].view(local.shape))
                self._gathered[id(parameter)] = version_of(local)
                self._written[id(parameter)] = version_of(whole)


class _Cuts:
    """How the numbers of some parameters, end to end, are cut into the parts of all ranks."""

    def __init__(self, sizes: list[list[int]]) -> None:
        self._sizes = sizes  # by rank and parameter
        self.of_rank = [sum(of_rank) for of_rank in sizes]
        self._count = len(sizes)

    def by_rank(self, flat: Tensor) -> Tensor:
        """First the parts of the first rank, then those of the second, and so on."""
        pieces = flat.split([size for of in zip(*self._sizes, strict=True) for size in of])
        ordered = [piece for rank in range(self._count) for piece in pieces[rank :: self._count]]
        return torch.cat(ordered)

    def by_parameter(self, of_rank: Tensor) -> Tensor:
        """The other way round, from a row for each rank that is filled up at its end."""
        pieces = [
            row[:size].split(sizes)
            for row, size, sizes in zip(of_rank, self.of_rank, self._sizes, strict=True)
        ]
        return torch.cat([piece for of in zip(*pieces, strict=True) for piece in of])
