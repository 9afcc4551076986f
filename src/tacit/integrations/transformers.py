"""`TacitTrainer`: private training with the arguments of `transformers.Trainer`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from tacit.budget import Budget
from tacit.data.text import IGNORED
from tacit.integrations.language_models import StackedRows, checkpoint_layers, require
from tacit.integrations.private_fit import SIZE_NOTE
from tacit.integrations.training_arguments import interval_of, optimizer_of, refuse_arguments
from tacit.losses.classification import CrossEntropy, MultiLabelCrossEntropy, TokenCrossEntropy
from tacit.losses.regression import MeanSquaredError
from tacit.noise import Noise
from tacit.precision import wide
from tacit.pytrees import call_model, num_rows
from tacit.queries.bounded_gradient import Loss
from tacit.queries.per_sample_clip import PerSampleClip
from tacit.queries.record_overlap import require_held_out
from tacit.records import Records
from tacit.report.folder_files import digest_of
from tacit.report.model_card import model_card
from tacit.report.privacy_statement import state
from tacit.report.run_folder import declared, environment
from tacit.sampling.poisson import PoissonSampler
from tacit.training import (
    Callback,
    Checkpoint,
    Evaluation,
    HeldOut,
    LedgerRun,
    Metrics,
    ProgressBar,
    Run,
    evaluate,
)
from tacit.training.evaluation import pieces_of
from tacit.training.trainer import Trainer

if TYPE_CHECKING:
    from transformers import TrainingArguments

LEDGER = "ledger.sqlite"


class TacitTrainer:
    """Trains a model of transformers with differential privacy, as `transformers.Trainer` is used.

        trainer = TacitTrainer(
            model, TrainingArguments("out", per_device_train_batch_size=16,
            gradient_accumulation_steps=32, learning_rate=1e-3), train_dataset=train,
            eval_dataset=test, processing_class=tokenizer, epsilon=8.0, delta=1e-5)
        trainer.train()
        trainer.evaluate()
        trainer.save_model("out/model")

    It is no subclass of `transformers.Trainer`, whose loop draws batches by shuffling, averages the
    loss over a batch, logs the loss of training batches and lets callbacks and subclasses see the
    gradients: each of these voids the guarantee, and a subclass that overrides one of them inherits
    the others. It sets up a `tacit.Trainer` instead, which is `self.private`.

    Guarantee: the weights are (ε, δ)-DP in the records of `train_dataset`, where one item is one
    record, for neighbours of which one has a record more. Metrics of `eval_dataset` are not
    covered.

    What is the same, and what is not:
    - The expected batch is `per_device_train_batch_size × gradient_accumulation_steps`. Batches are
      Poisson samples, so their sizes vary. The first of the two is how many records are processed
      at once. A private run wants large batches.
    - `max_grad_norm` is the clipping norm of each record's gradient, not of the batch's.
    - The loss of a record is the mean over its own tokens, not the mean over all of the batch's.
    - The training loss is private and is neither logged nor returned: `train()` returns a
      `tacit.Run`, and `log_history` has ε, the learning rate and metrics of `eval_dataset`.
    - `seed` of the arguments is not used (its usual value is known to all); give `seed` here.
    - `save_strategy` other than "no" keeps a checkpoint and a ledger in `output_dir`, so
      `train(resume_from_checkpoint=True)` resumes; when training ends, the model is saved there.
    - Arguments that could not be followed are refused with what to do instead.

    Args:
        train_dataset: items with what the model takes and `labels`, a `datasets.Dataset`, or
            `tacit.Records`, whose input_ids may be stacks of rows: (records, rows, length).
        data_collator: makes tensors of a list of items; by default it pads with
            `processing_class`. It is called once with all items, so that all have one length.
        compute_metrics: of an `EvalPrediction` of held-out records, as in transformers.
        max_grad_norm: C; by default that of the arguments.
        public_size: the number of training records, declared public. By default they are counted.
        privacy_unit: what one item is, for the statement: "user" if it is all text of a user.
        loss: one number per record from (logits, labels), where the labels do not tell which.
        ledger: what `tacit.Trainer` takes: a file that all runs over the same records share.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments | Any = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        *,
        compute_metrics: Callable[[Any], dict[str, float]] | None = None,
        callbacks: Sequence[Callback] = (),
        optimizers: tuple[Any, Any] = (None, None),
        epsilon: float,
        delta: float,
        max_grad_norm: float | None = None,
        noise_multiplier: float | None = None,
        public_size: int | None = None,
        privacy_unit: str = "record",
        loss: Loss | None = None,
        ledger: Any = None,
        seed: int | None = None,
        tokenizer: Any = None,
    ) -> None:
        transformers = require("transformers")
        if args is None:
            args = transformers.TrainingArguments()
        self.args: Any = args
        refuse_arguments(self.args)
        args = self.args
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError(
                f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, and TacitTrainer trains in one process "
                "on one device; start it without torchrun or accelerate launch"
            )
        self.processing_class = tokenizer if processing_class is None else processing_class
        self.compute_metrics = compute_metrics
        self.data_collator = data_collator or _usual_collator(self.processing_class)
        self.budget = Budget(epsilon, delta)
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise TypeError(
                    f"callbacks has a {type(callback).__name__}, and those of transformers are for "
                    "its own loop; give a tacit.Callback"
                )
        self.log_history: list[dict[str, Any]] = []
        self.run: Run | None = None
        self._callbacks, self._ledger, self._seed = list(callbacks), ledger, seed
        self._noise = noise_multiplier
        self._optimizers = optimizers
        self._given_loss = loss
        self._unit, self._size = privacy_unit, public_size
        self._clip = args.max_grad_norm if max_grad_norm is None else max_grad_norm
        if not self._clip > 0:
            raise ValueError(
                f"max_grad_norm is {self._clip}, and without clipping nothing bounds what one "
                "record does; give a number above 0, such as 1.0"
            )
        use_gpu = torch.cuda.is_available() and not args.use_cpu
        self.device = torch.device("cuda" if use_gpu else "cpu")
        self.model = model.to(self.device)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        if args.gradient_checkpointing or getattr(args, "activation_checkpointing", False):
            checkpoint_layers(model)
        config: Any = getattr(model, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False  # of keys and values, which training has no use for
        if args.eval_strategy != "no" and eval_dataset is None:
            raise ValueError(
                "eval_strategy asks for evaluations, and there is no "
                "eval_dataset; give one, or eval_strategy='no'"
            )

    # ---- what the user calls -------------------------------------------------------------------

    def train(self, resume_from_checkpoint: bool | str | None = None) -> Run:
        """Train within the budget, and return the run: its ε, its notes, its metrics."""
        resume = resume_from_checkpoint or None
        if resume is True:
            resume = self.args.output_dir
        trainer = self.private
        run = self.run = trainer.fit(resume=resume)
        if self.args.save_strategy != "no":
            self.save_model()
        return run

    def evaluate(self, eval_dataset: Any = None, metric_key_prefix: str = "eval") -> dict[str, Any]:
        """Loss and metrics of held-out records, by names that begin with the prefix.

        Training records are refused: their metrics would be released without noise.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise ValueError("there is no eval_dataset; give evaluate(dataset)")
        found = self._measured(self._held_out(dataset), metric_key_prefix)
        self.log_history.append({**found, "step": 0 if self.run is None else self.run.steps})
        return found

    def predict(self, test_dataset: Any, metric_key_prefix: str = "test") -> Any:
        """Outputs, labels and metrics of held-out records, as a `PredictionOutput`."""
        output = require("transformers").trainer_utils.PredictionOutput
        records = self._held_out(test_dataset)
        logits, labels = self._logits(records), _labels_of(records)
        metrics = {} if labels is None else self._measured(records, metric_key_prefix)
        return output(logits, labels, metrics)

    def save_model(self, output_dir: str | os.PathLike[str] | None = None) -> None:
        """Save model and tokenizer as `from_pretrained` reads them, and a card with the privacy."""
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        model: Any = self.model
        model.save_pretrained(folder)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)
        if self.run is None:
            return
        facts = self.run.facts() | {"environment": environment()}
        facts["config"] = {"used": {"max_norm": self._clip}}
        facts["model"] = {
            "architecture": {"auto_class": type(_base_of(model)).__name__},
            "class_names": None,
        }
        adapter = _base_of(model) is not model
        weights = [*folder.glob("model*.safetensors"), *folder.glob("adapter*.safetensors")]
        facts["model"]["files"] = {file.name: digest_of(file) for file in sorted(weights)}
        facts["public"] = declared(self.records, None)
        statement = state(facts, self.private.ledger)
        statement.save(folder)
        card = model_card(statement, facts, None, adapter)
        (folder / "README.md").write_text(card, encoding="utf-8")

    # ---- what it is made of --------------------------------------------------------------------

    @cached_property
    def records(self) -> Records:
        """The training records."""
        if self.train_dataset is None:
            raise ValueError("there is no train_dataset; give TacitTrainer(train_dataset=...)")
        records = self._records(self.train_dataset, "train_dataset")
        size, notes = self._size, records.notes
        if size is None and records.public_size is None:
            size, notes = len(records), (*notes, SIZE_NOTE)
        unit = records.privacy_unit if self._unit == "record" else self._unit
        return dataclasses.replace(
            records, public_size=size or records.public_size, notes=notes, privacy_unit=unit
        )

    @cached_property
    def steps(self) -> int:
        """The number of steps of the arguments: `max_steps`, or that of their epochs."""
        if self.args.max_steps > 0:
            return int(self.args.max_steps)
        size = self.records.require_public_size("a number of steps")
        return max(1, round(self.args.num_train_epochs * size / self.batch_size))

    @property
    def batch_size(self) -> int:
        """The expected number of records in a batch."""
        args = self.args
        return int(args.per_device_train_batch_size * args.gradient_accumulation_steps)

    @cached_property
    def wrapped(self) -> nn.Module:
        """The model as it is trained: its logits, in at least float32."""
        autocast = torch.bfloat16 if self.args.bf16 else None
        ids = self.records.inputs.get("input_ids")
        if ids is not None and ids.dim() == 3:
            return StackedRows(self.model, autocast)
        return _Logits(self.model, autocast)

    @cached_property
    def loss(self) -> Loss:
        """The loss that was given, or the usual one for such labels."""
        if self._given_loss is not None:
            if self.args.label_smoothing_factor:
                raise ValueError(
                    "label_smoothing_factor is for the usual losses, and a loss was given; leave "
                    "one of them out"
                )
            return self._given_loss
        return _usual_loss(self.model, self.records, self.args.label_smoothing_factor)

    @cached_property
    def private(self) -> Trainer:
        """The `tacit.Trainer` of the arguments; made when it is first needed."""
        args, records = self.args, self.records
        size = records.require_public_size("a sampling rate")
        if self.batch_size > size:
            raise ValueError(
                f"per_device_train_batch_size × gradient_accumulation_steps is {self.batch_size}, "
                f"and there are {size} records; give less"
            )
        sampler = PoissonSampler(
            records,
            expected_batch_size=self.batch_size,
            steps=self.steps,
            max_physical_batch=args.per_device_train_batch_size,
            # One shape: a GPU chooses its kernels by shape, and in bfloat16 they round differently.
            padded=args.bf16 or self.device.type == "cuda",
            seed=self._seed,
        )
        optimizer, scheduler = self._optimizer_and_schedule()
        epoch = max(1, round(size / self.batch_size))
        callbacks: list[Callback] = [_Log(self, epoch), *self._callbacks]
        if not args.disable_tqdm:
            callbacks.append(ProgressBar())
        every = {"steps": args.eval_steps or args.logging_steps, "epoch": epoch}
        held_out = None
        if args.eval_strategy != "no":
            interval = interval_of("eval_steps", every[args.eval_strategy.value], self.steps)
            held_out = HeldOut(self._held_out(self.eval_dataset), interval)
        checkpoint, ledger = None, self._ledger
        if args.save_strategy != "no":
            folder = Path(args.output_dir)
            folder.mkdir(parents=True, exist_ok=True)
            saved = {"steps": args.save_steps, "epoch": epoch}[args.save_strategy.value]
            checkpoint = Checkpoint(folder, interval_of("save_steps", saved, self.steps))
            ledger = folder / LEDGER if ledger is None else ledger
        trainer = Trainer(
            self.wrapped,
            self.loss,
            PerSampleClip(max_norm=float(self._clip)),
            sampler,
            optimizer,
            self.budget,
            noise=Noise(self._noise),
            scheduler=scheduler,
            evaluate_on=held_out,
            callbacks=callbacks,
            ledger=LedgerRun(ledger, args.run_name),
            checkpoint=checkpoint,
            seed=self._seed,
        )
        trainer.config = {"arguments": "transformers.TrainingArguments", "max_norm": self._clip}
        return trainer

    def _optimizer_and_schedule(self) -> tuple[Any, Any]:
        args = self.args
        optimizer, scheduler = self._optimizers
        if optimizer is None:
            optimizer = optimizer_of(self.wrapped, args)
        if scheduler is None:
            scheduler = require("transformers").get_scheduler(
                args.lr_scheduler_type,
                optimizer,
                num_warmup_steps=args.get_warmup_steps(self.steps),
                num_training_steps=self.steps,
                scheduler_specific_kwargs=args.lr_scheduler_kwargs or None,
            )
        return optimizer, scheduler

    def _records(self, dataset: Any, called: str) -> Records:
        """The dataset collated at once, as tensors with a row per record."""
        if isinstance(dataset, Records):
            return dataset
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise TypeError(
                f"{called} is a {type(dataset).__name__}, and records are drawn by their number; "
                "give a list of items, or a dataset with len(dataset) and dataset[i]"
            )
        items = [_taken(dataset[i], self.model) for i in range(len(dataset))]
        if not items:
            raise ValueError(f"{called} is empty; give it records")
        if getattr(self.data_collator, "mlm", False):
            raise ValueError(
                "the data_collator masks tokens at random each time it is called, and records are "
                "collated once; mask them in the dataset's items, or give mlm=False"
            )
        columns = dict(self.data_collator(items))
        tensors = {name: torch.as_tensor(value) for name, value in columns.items()}
        if num_rows(tensors, f"the collated {called}") != len(items):
            raise ValueError(
                f"the data_collator makes {num_rows(tensors)} rows of {len(items)} items, and each "
                "item must be one row: packing joins different records, and epsilon is for one"
            )
        self._require_own_rows(items, tensors)
        names = [name for name in ("labels", "label") if name in tensors]
        targets = tensors.pop(names[0]) if names else ()
        return Records(tensors, targets, name=called)

    def _require_own_rows(self, items: list[Any], tensors: dict[str, Tensor]) -> None:
        """An item that is collated alone is the same row, up to padding at its end.

        Padding at the beginning would move the positions of a text, by as much as the longest text
        is longer: one record would change the gradients of all others.
        """
        for i in {0, min(range(len(items)), key=lambda i: _length(items[i]))}:
            for name, alone in dict(self.data_collator([items[i]])).items():
                one, among = torch.as_tensor(alone)[0], tensors[name][i]
                cut = among if one.dim() == 0 else among[..., : one.shape[-1]]
                if one.shape != cut.shape or not torch.equal(cut, one):
                    raise ValueError(
                        f"the data_collator makes another {name!r} of an item when others are "
                        "beside it, so records would not stay apart; give one that only pads, and "
                        "at the end: tokenizer.padding_side = 'right'"
                    )

    def _held_out(self, dataset: Any) -> Records:
        if isinstance(dataset, Mapping) and "input_ids" not in dataset:
            raise ValueError(
                "eval_dataset is a dict of datasets; call evaluate(dataset) for each of them"
            )
        records = self._records(dataset, "eval_dataset")
        if self.train_dataset is not None:
            require_held_out(records, self.records)
        return records

    def _measured(self, records: Records, prefix: str) -> dict[str, Any]:
        size = self.args.per_device_eval_batch_size
        return self._named(evaluate(self.wrapped, records, self.loss, size), records, prefix)

    def _named(self, metrics: Metrics, records: Records, prefix: str) -> dict[str, Any]:
        """The metrics, and those of `compute_metrics`, by names that begin with the prefix."""
        facts = metrics.facts()
        found = {f"{prefix}_{name}": value for name, value in facts.items() if value is not None}
        if self.compute_metrics is not None:
            kind = require("transformers").EvalPrediction
            own = self.compute_metrics(kind(self._logits(records), _labels_of(records)))
            found |= {
                name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": value
                for name, value in own.items()
            }
        return found

    @torch.no_grad()
    def _logits(self, records: Records) -> np.ndarray:
        was_training = self.wrapped.training
        self.wrapped.eval()
        size = self.args.per_device_eval_batch_size
        parts = [
            call_model(self.wrapped, piece.inputs).cpu()
            for piece in pieces_of(records, size, self.wrapped)
        ]
        self.wrapped.train(was_training)
        return torch.cat(parts).numpy()


class _Logits(nn.Module):
    """The logits of a model of transformers, without the rest of what it returns."""

    def __init__(self, model: nn.Module, autocast: torch.dtype | None) -> None:
        super().__init__()
        self.model, self.autocast = model, autocast

    def forward(self, **inputs: Tensor) -> Tensor:
        if self.autocast is None:
            return wide(self.model(**inputs).logits)
        device = next(iter(inputs.values())).device
        with torch.autocast(device.type, dtype=self.autocast):
            outputs = self.model(**inputs)
        return wide(outputs.logits)


class _Log(Callback):
    """Keeps what is released in `log_history`, at the steps of the arguments."""

    def __init__(self, owner: TacitTrainer, epoch: int) -> None:
        args = owner.args
        self.owner = owner
        intervals = {"no": 0, "steps": args.logging_steps, "epoch": epoch}
        every = intervals[args.logging_strategy.value]
        self.every = interval_of("logging_steps", every, owner.steps) if every else 0

    def on_step(self, trainer: Trainer, step: int) -> None:
        if self.every and step % self.every == 0:
            rate = trainer.optimizer.param_groups[0]["lr"]
            spent = trainer.epsilon_after(step)
            self.owner.log_history.append({"step": step, "learning_rate": rate, "epsilon": spent})

    def on_evaluation(self, trainer: Trainer, evaluation: Evaluation) -> None:
        assert trainer.evaluate_on is not None
        found = self.owner._named(evaluation.metrics, trainer.evaluate_on, "eval")
        self.owner.log_history.append(
            {"step": evaluation.step, "epsilon": evaluation.epsilon, **found}
        )


def _usual_collator(processing_class: Any) -> Callable[[list[Any]], Any]:
    transformers = require("transformers")
    if processing_class is None or not hasattr(processing_class, "pad"):
        return partial(transformers.default_data_collator, return_tensors="pt")
    collator: Callable[[list[Any]], Any] = transformers.DataCollatorWithPadding(processing_class)
    return collator


def _taken(item: Any, model: nn.Module) -> Any:
    """An item without the columns that the model does not take, such as its text."""
    import inspect

    if not isinstance(item, Mapping):
        return item
    taken = set(inspect.signature(_base_of(model).forward).parameters)
    return {k: v for k, v in item.items() if k in taken or k in ("labels", "label")}


def _length(item: Any) -> int:
    """How much an item holds, to find a short one."""
    values = item.values() if isinstance(item, Mapping) else ()
    return sum(len(value) for value in values if hasattr(value, "__len__"))


def _base_of(model: Any) -> Any:
    """The model of transformers inside an adapter of peft."""
    inner = getattr(model, "get_base_model", None)
    return model if inner is None else inner()


def _is_causal(model: nn.Module) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = type(_base_of(model)).__name__
    return name.endswith("ForCausalLM") or name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def _usual_loss(model: nn.Module, records: Records, smoothing: float) -> Loss:
    """By the shape and the type of the labels."""
    labels = _only_labels(records)
    if labels is None:
        raise ValueError(
            "train_dataset has no 'labels'; give each item its labels (the input_ids themselves "
            "for a language model, -100 where there is padding), or a collator that does, such as "
            "DataCollatorForLanguageModeling(tokenizer, mlm=False)"
        )
    stacked = "input_ids" in records.inputs and records.inputs["input_ids"].dim() == 3
    if labels.is_floating_point():
        if labels.dim() == 1 or labels.shape[1:] == (1,):
            return MeanSquaredError()
        return MultiLabelCrossEntropy()
    if labels.dim() == 1:
        return CrossEntropy(smoothing=smoothing)
    tokens = labels.dim() == records.inputs["input_ids"].dim()
    if not tokens and not stacked:
        raise ValueError(
            f"labels have shape {tuple(labels.shape[1:])} per record, and no usual loss takes "
            "them; give TacitTrainer(loss=...)"
        )
    return TokenCrossEntropy(
        ignore_index=IGNORED, shift=tokens and _is_causal(model), label_smoothing=smoothing
    )


def _only_labels(records: Records) -> Tensor | None:
    return records.targets if isinstance(records.targets, Tensor) else None


def _labels_of(records: Records) -> np.ndarray | None:
    labels = _only_labels(records)
    return None if labels is None else labels.cpu().numpy()
