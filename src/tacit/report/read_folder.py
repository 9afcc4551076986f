"""`load_run`: from the folder of a run to a model.

Nothing in a folder runs code: JSON and safetensors are data, networks are built by registered names
alone, and every file must have the SHA-256 that run.json has for it. The import path of a user's
own module is followed only if the caller says so, with `import_model=True`.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file as load_weights
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from tacit.data.preprocessing import FILE as PREPROCESSING
from tacit.data.preprocessing import Preprocessing, load_preprocessing
from tacit.data.scattering import ScatteringMap
from tacit.data.table_schema import Schema
from tacit.errors import TacitError
from tacit.models.architectures import Architecture, registered_models
from tacit.report.folder_files import (
    FORMAT,
    LANGUAGE_MODEL,
    MODEL_FOLDER,
    SCHEMA,
    WEIGHTS,
    digest_of,
    require_file,
)
from tacit.report.saved_run import SavedRun


def load_run(
    folder: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    import_model: bool = False,
    device: torch.device | str = "cpu",
) -> SavedRun:
    """The run in `folder`, as `tacit train` and `tacit.save_run` write it, ready to predict.

        run = tacit.load_run("runs/x")
        print(run.predict("new.csv"), run.statement["text"])

    Args:
        model: the network, for a run of your own module; the run's weights are loaded into it.
        import_model: import the module that the folder names, which runs its code. Say so only for
            a folder whose author you trust.

    Raises ValueError for a folder that is damaged, incomplete, or none of a run.
    """
    run = load_model(folder, model=model, import_model=import_model, device=device)
    with _explained(run.folder):
        _ = run.statement  # ε is computed again, and is what the folder says
    return run


def load_model(
    folder: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    import_model: bool = False,
    device: torch.device | str = "cpu",
) -> SavedRun:
    """`load_run` without a look at the run's privacy, whose accounting takes time."""
    path = Path(folder)
    facts = read_facts(path)
    described = facts.get("model")
    if not isinstance(described, dict) or described.get("format") != FORMAT:
        found = described.get("format") if isinstance(described, dict) else None
        raise ValueError(
            f"{path}/run.json "
            + (
                f"has a model of format {found!r}, and {FORMAT} is known"
                if found is not None
                else "does not describe a model: an earlier version of Tacit or another program "
                "wrote it"
            )
            + "; train the run again, or use the version that wrote it"
        )
    architecture = described.get("architecture")
    if isinstance(architecture, dict) and architecture.get("kind") == LANGUAGE_MODEL:
        raise ValueError(
            f"{path} holds a language model, which transformers and peft load: its files, with a "
            f"model card that says how, are in {path / MODEL_FOLDER}"
        )
    _check_files(path, described)
    weights = _weights(path)
    with _explained(path):
        preprocessing = Preprocessing()
        if PREPROCESSING in described["files"]:
            preprocessing = load_preprocessing(path)
        schema = None
        if SCHEMA in described["files"]:
            stored = json.loads((path / SCHEMA).read_text(encoding="utf-8"))
            schema = Schema.from_dict(stored)
        network = model or _network(path, described["architecture"], weights, import_model)
        run = SavedRun(path, facts, network, preprocessing, schema)
        _require_fit(run)
    _fill(path, network, weights)
    network.eval()
    try:
        network.to(device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"device is {str(device)!r}, which is not available: {str(error).splitlines()[0]}"
        ) from error
    return run


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Whatever a damaged run.json raises is one error that names it."""
    try:
        yield
    except TacitError:
        raise
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(
            f"{folder}/run.json does not describe a model ({type(error).__name__}: {error}); copy "
            "the folder again"
        ) from error
    except ValueError as error:
        raise ValueError(f"{folder} cannot be loaded: {error}") from error


def read_facts(folder: Path) -> dict[str, Any]:
    """run.json of a run, or an error that says what is wrong with it."""
    require_file(folder, "run.json")
    try:
        text = (folder / "run.json").read_text(encoding="utf-8")
        facts = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{folder}/run.json is not JSON ({error}); it was not made by tacit train"
        ) from error
    return facts if isinstance(facts, dict) else {}


# ---- parts of a folder ---------------------------------------------------------------------------


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON")


def _check_files(folder: Path, described: dict[str, Any]) -> None:
    """Every file is there and is the one that run.json was written with."""
    files = described.get("files")
    if not isinstance(files, dict) or WEIGHTS not in files:
        raise ValueError(f"{folder}/run.json does not list the run's files; copy the folder again")
    for name, digest in files.items():
        if name not in (WEIGHTS, PREPROCESSING, SCHEMA):
            raise ValueError(f"{folder}/run.json lists {name!r}, which is no file of a run")
        if not (folder / name).is_file():
            raise ValueError(
                f"{folder} has no {name}, which its run.json lists; copy the whole folder again"
            )
        if digest_of(folder / name) != digest:
            raise ValueError(
                f"{folder}/{name} is not the file that run.json was written with: it is damaged, "
                "or of another run; copy the folder again"
            )


def _require_fit(run: SavedRun) -> None:
    """Refuse preprocessing that does not take a record of the run to an input of its network."""
    stages, shape = run.preprocessing.stages, run.record_shape
    if not stages or shape is None or any(isinstance(s, ScatteringMap) for s in stages):
        return
    try:
        found = tuple(run.preprocessing(torch.zeros(1, *shape)).shape[1:])
    except (LookupError, RuntimeError, ValueError, TypeError) as error:
        raise ValueError(
            f"its {PREPROCESSING} does not fit its records ({' '.join(str(error).split())})"
        ) from error
    if found != run.input_shape:
        raise ValueError(
            f"its {PREPROCESSING} makes inputs of shape {found}, not {run.input_shape}"
        )


def _weights(folder: Path) -> dict[str, Tensor]:
    try:
        return load_weights(folder / WEIGHTS)
    except (SafetensorError, ValueError, RuntimeError, KeyError, OSError) as error:
        raise ValueError(
            f"the weights in {folder} cannot be read ({str(error).splitlines()[0]}); copy the "
            "folder again"
        ) from error


def _network(
    folder: Path, stored: Any, weights: dict[str, Tensor], import_model: bool
) -> nn.Module:
    values = dict(stored)
    kind = values.pop("kind")
    if kind == "import":
        return _imported(folder, import_model, **values)
    if kind != "registered":
        raise ValueError(f"its architecture has the kind {kind!r}")
    name = values.get("name")
    if name not in registered_models():
        raise ValueError(
            f"its network is {name!r}, which no module registers that was imported; import the "
            "module that does (tacit --plugin FILE), or give load_run(folder, model=...)"
        )
    architecture = Architecture(**values)
    try:
        # On no device first: a damaged number must not take all memory.
        with torch.device("meta"), _no_more_parameters(weights):
            bare = Architecture(**{**values, "adapted": "as-built"}).build().model
    except _TooLarge:
        raise
    except Exception:  # a builder that needs numbers is built as it is
        pass
    else:
        _require_size(bare, weights)
    try:
        with torch.random.fork_rng(devices=[]), _no_more_parameters(weights):
            return architecture.build().model
    except _TooLarge:
        raise
    except Exception as error:  # whatever the function raises, it was given wrong arguments
        raise ValueError(
            f"the network {name!r} cannot be built as run.json says "
            f"({type(error).__name__}: {error})"
        ) from error


class _TooLarge(ValueError):
    pass


@contextmanager
def _no_more_parameters(weights: dict[str, Tensor]) -> Iterator[None]:
    """Raise once a network is made of far more parameters than the folder has weights for.

    A damaged depth would go on for minutes and take all memory, also without any numbers.
    """
    left, here = 10 * len(weights) + 10_000, threading.get_ident()

    def count(module: nn.Module, name: str, parameter: object) -> None:
        nonlocal left
        left -= threading.get_ident() == here
        if left < 0:
            raise _TooLarge(
                f"its network has far more layers than the {len(weights)} weights in the folder"
            )

    handle = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


def _require_size(network: nn.Module, weights: dict[str, Tensor]) -> None:
    size = sum(tensor.numel() for tensor in network.state_dict().values())
    held = sum(tensor.numel() for tensor in weights.values())
    if size > 10 * held + 1_000_000:
        raise ValueError(
            f"its network has {size:,} numbers, and the weights in the folder have {held:,}"
        )


def _imported(
    folder: Path,
    allowed: bool,
    module: str,
    name: str,
    arguments: dict[str, Any] | None,
    layers: str,
) -> nn.Module:
    """The user's own network, if the caller allows the import."""
    path = f"{module}.{name}"
    give = f"give the network: tacit.load_run({str(folder)!r}, model=...)"
    if not all(isinstance(part, str) for part in (module, name)) or not all(
        part.isidentifier() for part in path.split(".")
    ):
        raise ValueError(f"its network is {path!r}, which cannot be imported; {give}")
    if module == "__main__" or (module.split(".")[0] == "torch" and not arguments):
        raise ValueError(f"its network is {path}, which a folder cannot hold; {give}")
    if not allowed:
        raise ValueError(
            f"its network is {path}, a module of your own, and importing it runs its code; {give}, "
            "or, if you trust the folder's author, say load_run(..., import_model=True) "
            "(--import-model on the command line)"
        )
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:  # importing runs code, which may raise anything
        raise ValueError(
            f"its network {path} cannot be imported ({type(error).__name__}: {error}); {give}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ValueError(f"{path} is no class of torch.nn.Module; {give}")
    try:
        with torch.random.fork_rng(devices=[]):
            network = found(**(arguments or {}))
    except Exception as error:
        raise ValueError(
            f"{path} cannot be made with the arguments {arguments or 'none'} "
            f"({type(error).__name__}: {error}); {give}, or save with "
            "save_run(..., arguments={...})"
        ) from error
    if hashlib.sha256(str(network).encode()).hexdigest() != layers:
        raise ValueError(
            f"{path} makes another network with the arguments {arguments or 'none'} than the one "
            f"that was saved; {give}, or save with save_run(..., arguments={{...}})"
        )
    return network


def _fill(folder: Path, network: nn.Module, weights: dict[str, Tensor]) -> None:
    """Load the weights, in the type that they were trained in."""
    if not isinstance(network, nn.Module):
        raise TypeError(f"model is {type(network).__name__}; give a torch.nn.Module")
    for name, tensor in [*network.named_parameters(), *network.named_buffers()]:
        if name in weights and weights[name].dtype != tensor.dtype:
            tensor.data = tensor.data.to(weights[name].dtype)
    try:
        network.load_state_dict(weights)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"the weights in {folder} do not fit the network: {' '.join(str(error).split()[:40])}"
        ) from error
