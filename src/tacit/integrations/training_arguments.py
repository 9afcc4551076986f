"""Which of `transformers.TrainingArguments` a private run follows, and which it refuses.

An argument is followed, without effect on the model, or refused as soon as it differs from its
default. So an argument of a later version of transformers is never ignored in silence.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import TrainingArguments

# Arguments that are followed.
_FOLLOWED = {
    "output_dir", "per_device_train_batch_size", "gradient_accumulation_steps",
    "num_train_epochs", "max_steps", "learning_rate", "lr_scheduler_type",
    "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "optim", "weight_decay",
    "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "label_smoothing_factor",
    "bf16", "gradient_checkpointing", "activation_checkpointing", "logging_strategy",
    "logging_steps", "disable_tqdm", "run_name", "eval_strategy", "eval_steps",
    "per_device_eval_batch_size", "save_strategy", "save_steps", "use_cpu",
}  # fmt: skip
# Arguments that change neither the model nor what is computed here, so that nothing is lost.
_WITHOUT_EFFECT = {
    "do_train", "do_eval", "do_predict", "log_level", "log_level_replica", "logging_dir",
    "logging_nan_inf_filter", "log_on_each_node", "save_on_each_node", "save_safetensors",
    "skip_memory_metrics", "local_rank", "remove_unused_columns", "project", "ddp_timeout",
    "dataloader_pin_memory", "dataloader_num_workers", "dataloader_prefetch_factor",
    "dataloader_persistent_workers", "eval_accumulation_steps", "include_num_input_tokens_seen",
    "average_tokens_across_devices", "use_cache", "past_index", "eval_do_concat_batches",
    "eval_use_gather_object", "hub_strategy", "hub_token",
    "hub_model_id", "hub_private_repo", "hub_always_push", "hub_revision",
}  # fmt: skip
# What to do instead of an argument that is refused; any other has only a general answer.
_INSTEAD = {
    "seed": "known seeds make noise that anybody can remove, and 42 is the usual one, so it is "
    "never used; for a run that can be repeated, and is not private against whoever knows the "
    "seed, give TacitTrainer(seed=...)",
    "data_seed": "batches are drawn from the operating system; give TacitTrainer(seed=...) for a "
    "run that can be repeated",
    "train_sampling_strategy": "epsilon counts on each record being drawn with the same "
    "probability, whatever its length; leave it out",
    "group_by_length": "epsilon counts on each record being drawn with the same probability, "
    "whatever its length; leave it out",
    "dataloader_drop_last": "batches are Poisson samples and no record is dropped; leave it out",
    "load_best_model_at_end": "the best of several models would be chosen by held-out text after "
    "the run; leave it out, and choose a number of steps beforehand",
    "fp16": "float16 needs loss scaling, which follows private gradients; give bf16=True",
    "torch_compile": "steps are compiled without being asked; leave it out",
    "report_to": "loggers are callbacks: TacitTrainer(callbacks=[WandbLogger(...)])",
    "resume_from_checkpoint": "give it to train(resume_from_checkpoint=True)",
    "logging_first_step": "the loss of a private batch is never shown; leave it out",
    "neftune_noise_alpha": "its draws are not part of the accounted program; leave it out",
    "push_to_hub": "save the model, look at its card, and push the folder: model.push_to_hub(...)",
}


def refuse_arguments(args: TrainingArguments) -> None:
    """Raise ValueError for an argument that differs from its default and would not be followed."""
    choices = {
        "save_strategy": ("no", "steps", "epoch"),
        "eval_strategy": ("no", "steps", "epoch"),
        "optim": ("adamw_torch", "adamw_torch_fused", "sgd"),
    }
    for name, known in choices.items():
        value = getattr(args, name)
        if getattr(value, "value", value) not in known:
            raise ValueError(
                f"{name} is {getattr(value, 'value', value)!r}; give {' or '.join(known)}"
                + (", or optimizers=(optimizer, None)" if name == "optim" else "")
            )
    schedule = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    if schedule in ("reduce_lr_on_plateau", "greedy"):
        raise ValueError(
            f"lr_scheduler_type is {schedule!r}, which follows the loss during "
            "training; give one that follows the steps, such as linear"
        )
    default = type(args)(output_dir=args.output_dir)
    for field in dataclasses.fields(args):
        name, value = field.name, getattr(args, field.name)
        if name in _FOLLOWED or name in _WITHOUT_EFFECT or value == getattr(default, name):
            continue
        why = _INSTEAD.get(name, "private training does not follow it; leave it out")
        raise ValueError(f"{name} is {getattr(value, 'value', value)!r}: {why}")


def interval_of(name: str, value: float, steps: int) -> int:
    """Steps between two events; below 1 it is a share of the run, as in transformers."""
    if not value > 0:
        raise ValueError(f"{name} is {value}; give a number above 0")
    return max(1, math.ceil(value * steps) if value < 1 else int(value))


def optimizer_of(model: nn.Module, args: TrainingArguments) -> torch.optim.Optimizer:
    """AdamW or SGD; biases and the weights of normalisation are not decayed."""
    from transformers.trainer_pt_utils import get_parameter_names

    norms = (r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")
    decayed = set(get_parameter_names(model, [nn.LayerNorm], list(norms)))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    groups = [
        {
            "params": [p for name, p in trained.items() if (name in decayed) is decay],
            "weight_decay": args.weight_decay if decay else 0.0,
        }
        for decay in (True, False)
    ]
    groups = [group for group in groups if group["params"]]
    if args.optim == "sgd":
        return torch.optim.SGD(groups, lr=args.learning_rate)
    betas = args.adam_beta1, args.adam_beta2
    return torch.optim.AdamW(groups, lr=args.learning_rate, betas=betas, eps=args.adam_epsilon)
