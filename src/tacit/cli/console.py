"""What every command shares: `--json`, what is printed, `--device`, and `--plugin`.

A plugin is a user's own module. Losses (`@tacit.register_loss`), networks
(`@tacit.models.register_model`), datasets (`@tacit.data.register_dataset`), gradient rules
(`@tacit.gradient_rule`) and sampling schemes (`@tacit.register_scheme`) are registered when it is
imported. Importing runs the module's code, so only the user names a plugin, on the command line,
and never a saved file.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

JSON = typer.Option(False, "--json", help="Print one JSON object and nothing else.")
PLUGIN: list[str] = typer.Option(
    [],
    "--plugin",
    metavar="FILE|MODULE",
    help="Import this Python file or module first. The losses, networks, datasets, gradient "
    "rules and sampling schemes that it registers can then be named. May be given several times.",
)

_imported: dict[str, str] = {}
_store: dist.Store | None = None  # that the ranks have met at
_tells: bool | None = None


def print_json(facts: dict[str, Any]) -> None:
    from tacit.report.folder_files import to_json

    typer.echo(to_json(facts))


def print_facts(facts: dict[str, Any], as_json: bool, title: str) -> None:
    """Facts as JSON, or as a table of two columns."""
    if as_json:
        print_json(facts)
        return
    from rich.console import Console

    from tacit.canvas import facts_table

    rows = (
        (name.replace("_", " "), f"{value:.6g}" if isinstance(value, float) else str(value))
        for name, value in facts.items()
    )
    Console().print(facts_table(title, rows))


def device_for(name: str) -> torch.device:
    """The device of this name, or an error if this machine has none; auto prefers a GPU."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if ranks_started() > 1 and gpus and name in ("auto", "cuda"):  # each rank has one of its own
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        return torch.device("cuda", torch.cuda.current_device())
    if name == "auto":
        return torch.device("cuda" if gpus else "cpu")
    names = ["cpu"]
    if gpus:
        names += ["cuda", *(f"cuda:{i}" for i in range(gpus))]
    if name not in names:
        raise ValueError(
            f"--device is {name!r}, and PyTorch finds {gpus or 'no'} CUDA GPUs here; give auto or "
            f"{' or '.join(names)}"
        )
    return torch.device(name)


def ranks_started() -> int:
    """How many processes `torchrun` has started for this command; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def is_first_rank() -> bool:
    """Whether this process speaks for all ranks: the others print nothing."""
    return ranks_started() == 1 or os.environ.get("RANK") == "0"


def tells_error() -> bool:
    """Whether this process tells why it fails: of several ranks, the one that asks first.

    A rank asks before it leaves the others, which only see that it is gone. Ranks that have not
    met leave it to the first.
    """
    global _tells
    if _tells is None and _store is not None:
        with suppress(RuntimeError):  # the store is gone, and the first rank with it
            _tells = _store.add("errors", 1) == 1
    return is_first_rank() if _tells is None else _tells


def join_ranks(device: torch.device) -> DeviceMesh:
    """Meet the other ranks that `torchrun` has started.

    Ranks that are started again find the same store, with the addresses of those that were killed.
    So each attempt has keys of its own there.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    held_by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    rank, count = int(os.environ["RANK"]), ranks_started()
    whole = dist.TCPStore(address, port, count, is_master=rank == 0 and not held_by_agent)
    store = dist.PrefixStore(f"tacit {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", whole)
    global _store
    _store = store
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=count)
    return init_device_mesh(device.type, (count,))


def import_plugin(name: str) -> None:
    """Import a file that ends in .py by its path, or a module by its name."""
    if not name.endswith(".py"):
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            raise ValueError(
                f"--plugin is {name!r}, and there is no such module; give an installed module, or "
                "the path of a file that ends in .py"
            )
        _imported[name] = f"module {name}"
        with _explained(name):
            importlib.import_module(name)
        return
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"--plugin is {name!r}, and there is no such file; check the path")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    module_name = f"tacit_plugin_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # so that its classes can be found again by name
    with _explained(name):
        spec.loader.exec_module(module)
    _imported[name] = f"file {name}, sha256 {digest}"


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Say of an error which plugin it comes from; the user's own code may raise anything."""
    try:
        yield
    except Exception as error:
        said = (str(error).strip().splitlines() or ["no message"])[0]
        raise ValueError(
            f"--plugin {name} cannot be imported ({type(error).__name__}: {said}); run it with "
            "Python alone, or with TACIT_DEBUG=1, to see where"
        ) from error


def imported_plugins() -> list[str]:
    """What was imported, with a file's checksum, for the run's report."""
    return list(_imported.values())
