"""Models of `transformers`, prepared for private training: loading, adapters, rows, samples.

Neither transformers nor peft is imported before it is needed, and neither is changed: a model is
wrapped in `StackedRows` for training, and taken out of it to generate and to be saved.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tacit.data.text import Tokenize
from tacit.errors import argument, in_words
from tacit.precision import wide

TextTask = Literal["causal", "classification"]


def require(package: str, extra: str = "transformers") -> Any:
    """The optional package, or ImportError that says how to install it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        if error.name is not None and error.name.split(".")[0] != package:
            raise
        raise ImportError(
            f"{package} is not installed; install it with: pip install 'tacit[{extra}]'"
        ) from error


class StackedRows(nn.Module):
    """A language model whose record is a stack of rows: (records, rows, length).

    The model sees the rows of all records below each other, (records·rows, length), and each
    record gets its own rows of logits back: (records, rows, length, vocabulary), or
    (records, rows, classes). No row is split between two records, so per-sample clipping bounds
    what a whole stack adds to a gradient, however many rows it has.

    With `autocast` the model computes in that type. The logits are at least float32.
    """

    def __init__(self, model: nn.Module, autocast: torch.dtype | None = None) -> None:
        super().__init__()
        self.model = model
        self.autocast = autocast

    def computing(self, device: torch.device) -> AbstractContextManager[Any]:
        """The precision that the model computes in."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.autocast)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        with self.computing(input_ids.device):
            outputs = self.model(
                input_ids=input_ids.flatten(0, 1), attention_mask=attention_mask.flatten(0, 1)
            )
        return wide(outputs.logits).unflatten(0, input_ids.shape[:2])


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the libraries' advice on training loops that are not ours."""
    transformers = require("transformers")
    level = transformers.logging.get_verbosity()
    bars = transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        transformers.logging.set_verbosity(level)
        if bars:
            transformers.logging.enable_progress_bar()


def load_tokenizer(name: str) -> Any:
    """The tokenizer in a folder, or of this name on the hub."""
    _require_folder(name)
    with _quiet(), _explained(name, "tokenizer"):
        tokenizer = require("transformers").AutoTokenizer.from_pretrained(name)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    if tokenizer.pad_token_id is None:
        raise ValueError(
            f"the tokenizer of {argument('model')} {name} has no token for padding and none for "
            "the end of a text; give it one (tokenizer.pad_token = ...) and save it again"
        )
    return tokenizer


def load_language_model(
    name: str,
    task: TextTask,
    classes: Sequence[str] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    pad: int | None = None,
) -> nn.Module:
    """The model in a folder, or of this name on the hub, with its weights in `dtype`.

    A classifier gets one output per class. No code of the folder's or the hub's is run.
    """
    _require_folder(name)
    transformers = require("transformers")
    options: dict[str, Any] = {"dtype": dtype}
    kind = transformers.AutoModelForCausalLM
    if task == "classification":
        assert classes is not None
        kind = transformers.AutoModelForSequenceClassification
        options["id2label"] = dict(enumerate(classes))
        options["label2id"] = {label: i for i, label in enumerate(classes)}
        options["num_labels"] = len(classes)
    with _quiet(), _explained(name, f"model for the task {task}"):
        model: nn.Module = kind.from_pretrained(name, **options)
    config: Any = model.config
    if config.pad_token_id is None:
        config.pad_token_id = pad
    config.use_cache = False  # of keys and values, which training has no use for
    return model


def _require_folder(name: str) -> None:
    """Refuse what can only be a path, and leads nowhere; a name of the hub has one slash at most.

    The hub would be asked for it over the network otherwise, and gives a puzzling answer.
    """
    path = Path(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            hint = ""
            if (path / "adapter_config.json").is_file():
                hint = " (it holds an adapter: merge it into its model, and save that)"
            raise ValueError(
                f"{argument('model')} is {name}, which has no config.json{hint}; give a folder "
                "that model.save_pretrained(folder) wrote, with its tokenizer"
            )
        return
    if path.exists() or path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ValueError(
            f"{argument('model')} is {name}, and there is no such folder; give the folder of a "
            "model, or its name on the hub, such as gpt2"
        )


@contextmanager
def _explained(name: str, what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of any kind: files, the network, a damaged configuration
        said = (str(error).strip().splitlines() or ["no message"])[0]
        where = (
            "from this folder" if Path(name).is_dir() else "from the hub, nor is it in its cache"
        )
        raise ValueError(
            f"{argument('model')} is {name}, and its {what} cannot be loaded {where} "
            f"({type(error).__name__}: {said}); give the folder of a model with its tokenizer, as "
            "save_pretrained writes it, or a name such as gpt2"
        ) from error


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters: W + (α/r)·B·A beside each chosen weight W, which stays frozen."""

    rank: int
    targets: tuple[str, ...] | None = None
    alpha: float | None = None

    def onto(self, model: nn.Module, task: TextTask) -> nn.Module:
        """The model with adapters in float32; all its own weights are frozen."""
        peft = require("peft")
        from transformers.pytorch_utils import Conv1D

        config = peft.LoraConfig(
            r=self.rank,
            lora_alpha=2 * self.rank if self.alpha is None else self.alpha,
            target_modules="all-linear" if self.targets is None else list(self.targets),
            task_type="CAUSAL_LM" if task == "causal" else "SEQ_CLS",
            fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in model.modules()),
        )
        with _quiet():
            try:
                adapted: nn.Module = peft.get_peft_model(model, config)
            except ValueError as error:
                said = str(error).splitlines()[0]
                raise ValueError(
                    f"no adapter can be put on {type(model).__name__} ({said}); give "
                    f"{argument('targets', '--lora-targets')} names of its linear layers"
                ) from error
        return adapted


def checkpoint_layers(model: nn.Module) -> None:
    """Have the layers of a model of transformers run again in the backward pass."""
    enable = getattr(model, "gradient_checkpointing_enable", None)
    try:
        if enable is None:
            raise ValueError("it has no gradient_checkpointing_enable")
        with _quiet():
            enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    except ValueError as error:
        raise ValueError(
            f"{type(model).__name__} cannot run its layers again ({error}); leave "
            f"{argument('gradient_checkpointing')} out"
        ) from error


def context_of(model: nn.Module, tokenizer: Any) -> int | None:
    """The longest row that the model takes; None if neither it nor its tokenizer says."""
    config: Any = model.config
    names = ("max_position_embeddings", "n_positions", "max_sequence_length")
    declared = [getattr(config, name, None) for name in names]
    limits = [int(n) for n in (*declared, tokenizer.model_max_length) if n and n < 10**9]
    return min(limits, default=None)


def require_vocabulary(model: nn.Module, tokenizer: Any) -> None:
    """Refuse a tokenizer with more tokens than the model has embeddings for."""
    rows = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    if len(tokenizer) > rows:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens, and the model embeds {rows}; give a model "
            "with its own tokenizer, or resize it: model.resize_token_embeddings(len(tokenizer))"
        )


def tokenize_with(tokenizer: Any, max_length: int | None = None) -> Tokenize:
    """Texts to tokens, with the special tokens that the tokenizer adds; cut at `max_length`."""

    def tokens(texts: list[str]) -> list[list[int]]:
        cut = {} if max_length is None else {"truncation": True, "max_length": max_length}
        found: list[list[int]] = tokenizer(texts, verbose=False, **cut)["input_ids"]
        return found

    return tokens


@torch.no_grad()
def generate(
    model: StackedRows,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    new_tokens: int,
    temperature: float = 0.0,
    seed: int | None = None,
) -> list[str]:
    """What the model continues each prompt with: its most probable tokens, or a sample of them.

    Samples are drawn from a seed of their own, so PyTorch's generator stays as it is.
    """
    device = next(model.parameters()).device
    inner: Any = model.model
    drawn: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        drawn = {"do_sample": True, "temperature": temperature, "top_k": 0}
    samples = []
    was_training = inner.training
    inner.eval()
    devices = [device] if device.type == "cuda" else []
    with _quiet(), torch.random.fork_rng(devices=devices), model.computing(device):
        torch.manual_seed(torch.seed() if seed is None else seed)
        for prompt in prompts:
            ids = prompt_ids(tokenizer, prompt).to(device)
            found = inner.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                pad_token_id=tokenizer.pad_token_id,
                use_cache=True,
                **drawn,
            )
            samples.append(tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True))
    inner.train(was_training)
    return samples


def prompt_ids(tokenizer: Any, prompt: str) -> Tensor:
    """(1, length): the tokens of a text that is to be continued, so without an end."""
    ids = list(tokenizer(prompt)["input_ids"])
    if ids[-1:] == [tokenizer.eos_token_id] and len(ids) > 1:
        ids = ids[:-1]
    if not ids:
        start = tokenizer.bos_token_id
        ids = [tokenizer.eos_token_id if start is None else start]
    if ids == [None]:
        raise ValueError(
            f"the prompt {prompt!r} has no tokens; give a {in_words('prompt', '--prompt')} of one "
            "word or more"
        )
    return torch.tensor([ids])


def save_language_model(model: StackedRows, tokenizer: Any, folder: Path) -> list[str]:
    """Write weights or adapter and tokenizer as `from_pretrained` reads them.

    Returns the names of the files.
    """
    inner: Any = model.model
    inner.config.use_cache = True
    try:
        with _quiet():
            inner.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    finally:
        inner.config.use_cache = False
    # peft has written a card of its own, without a word on privacy.
    (folder / "README.md").unlink(missing_ok=True)
    return sorted(file.name for file in folder.iterdir() if file.is_file())
