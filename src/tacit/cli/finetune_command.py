"""`tacit finetune`: from a language model and a file of text to a private model in a folder."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from tacit.cli import launch
from tacit.cli.console import is_first_rank, print_json
from tacit.cli.finetune_settings import FinetuneSettings
from tacit.cli.schema import command_of, to_dict

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from tacit.data.text import TextForm
    from tacit.integrations.language_models import StackedRows
    from tacit.records import Records

USUAL_LENGTH, USUAL_BLOCKS, USUAL_ROWS = 128, 4, 8
USUAL_BATCH, USUAL_EPOCHS = 1024, 5.0
USUAL_RATES = {"adapter": 1e-3, "full": 2e-4}
ROWS_AT_ONCE = 32


def finetune(s: FinetuneSettings) -> None:
    r"""Fine-tune a language model with differential privacy, and save it in a folder.

    Example: tacit finetune --model gpt2 --data notes.jsonl --lora 16 --epsilon 8 --out runs/x

    Private for users: tacit finetune --model gpt2 --data notes.jsonl --record user --lora 16

    A classifier: tacit finetune --model roberta-base --task classification --data reviews.jsonl

    Resume a run that was killed: tacit finetune --resume runs/x

    On several GPUs: torchrun --nproc-per-node 8 -m tacit finetune --model gpt2 --data notes.jsonl
    --out runs/x

    Needs the extra transformers: pip install 'tacit\[transformers]'
    """
    for flag, given in (("--model", s.model), ("--data", s.data)):
        if given is None:
            raise ValueError(
                f"{flag} is not given; tacit finetune takes a model and a file of text: "
                "tacit finetune --model gpt2 --data notes.jsonl --lora 16"
            )
    assert s.data is not None
    facts, folder = launch.launched(s, _finetuned_in, s.data.stem)
    if not is_first_rank():
        return
    if s.json:
        print_json(facts)
    else:
        _print(facts, folder)
    if facts["stopped"] == "interrupted":
        raise typer.Exit(130)


class _Text(NamedTuple):
    """The training records and the held-out ones, the classes if any, and notes for the report."""

    train: Records
    held_out: Records | None
    notes: list[str]


def _finetuned_in(folder: Path, s: FinetuneSettings, mesh: DeviceMesh | None) -> dict[str, Any]:
    import torch
    from torch.distributed.fsdp import fully_shard

    import tacit
    from tacit.cli import run_directory
    from tacit.cli.console import device_for
    from tacit.data import text
    from tacit.errors import NotPublic
    from tacit.integrations import language_models as models
    from tacit.noise import Noise
    from tacit.ranks import Ranks
    from tacit.report.run_folder import declared
    from tacit.training import Callback, HeldOut, LedgerRun, ProgressBar
    from tacit.training.evaluation import Metrics, evaluate
    from tacit.training.trainer import Trainer

    assert s.model is not None
    assert s.data is not None
    models.require("transformers")
    if s.lora:
        models.require("peft")
    budget = tacit.Budget(s.epsilon, s.delta)
    device = device_for(s.device)
    ranks = None if mesh is None else Ranks(mesh)
    initial = launch.initial_seed(folder, s, ranks)
    torch.manual_seed(initial)

    label = (s.label_field or "label") if s.task == "classification" else None
    user = (s.user_field or "user") if s.record == "user" else None
    fields: dict[str, Any] = {"text": s.text_field, "label": label, "user": user}
    lines = text.read_lines(s.data, **fields)
    held_out_lines = None if s.held_out is None else text.read_lines(s.held_out, **fields)
    notes = []
    classes = s.classes
    if label is not None and classes is None:
        classes = text.classes_in(lines)
        notes.append("the classes were read from the file and are treated as public")
    if classes is not None and len(set(classes)) < len(classes):
        raise ValueError(
            f"--classes is {','.join(classes)}, which names a class twice; name each once"
        )
    if classes is not None and len(classes) < 2:
        raise ValueError(
            f"there is one class, {classes[0]!r}, and nothing to tell apart; give lines of two "
            "classes or more, or declare all of them with --classes"
        )

    tokenizer = models.load_tokenizer(s.model)
    network = models.load_language_model(
        s.model,
        s.task,
        classes,
        dtype=torch.bfloat16 if s.bf16 and s.lora else torch.float32,
        pad=tokenizer.pad_token_id,
    )
    models.require_vocabulary(network, tokenizer)
    context = models.context_of(network, tokenizer)
    length = s.max_length or min(USUAL_LENGTH, context or USUAL_LENGTH)
    if context is not None and length > context:
        raise ValueError(
            f"--max-length is {length}, and the model reads {context} tokens at most; give at "
            f"most {context}"
        )
    _check_prompts(s, tokenizer, context)
    rows = {
        "line": 1,
        "document": s.max_blocks or USUAL_BLOCKS,
        "user": s.max_rows or USUAL_ROWS,
    }[s.record]
    form = text.TextForm(
        s.record,
        length,
        rows,
        pack=s.pack,
        end=tokenizer.eos_token_id,
        pad=tokenizer.pad_token_id,
        classes=classes,
    )
    data = _records(s, form, tokenizer, lines, held_out_lines, device)

    if s.lora:
        network = models.Lora(s.lora, s.lora_targets, s.lora_alpha).onto(network, s.task)
    if s.gradient_checkpointing:
        models.checkpoint_layers(network)
    model = models.StackedRows(network, torch.bfloat16 if s.bf16 else None).to(device)
    if ranks is not None and s.shard:
        ranks.begin(model)  # all cut the first rank's weights
        fully_shard(model, mesh=mesh)
    loss = tacit.losses.TokenCrossEntropy(shift=s.task == "causal")
    size = data.train.require_public_size("a sampling rate")
    batch = s.batch_size or min(USUAL_BATCH, max(1, size // 4))
    if batch > size:
        raise ValueError(f"--batch-size is {batch}, and there are {size} records; give fewer")
    steps = s.steps
    if steps is None:
        steps = max(1, round((s.epochs or USUAL_EPOCHS) * size / batch))
    micro = s.micro_batch or max(1, ROWS_AT_ONCE // rows)
    sampler = tacit.PoissonSampler(
        data.train,
        expected_batch_size=batch,
        steps=steps,
        max_physical_batch=micro,
        # One shape: a GPU chooses its kernels by shape, and in bfloat16 they round differently.
        padded=device.type == "cuda" or s.bf16,
        seed=s.seed,
    )
    trained = [p for p in model.parameters() if p.requires_grad]
    rate = s.lr or USUAL_RATES["adapter" if s.lora else "full"]
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=s.weight_decay)
    callbacks: list[Callback] = [] if s.quiet or not is_first_rank() else [ProgressBar()]
    held_out = None if data.held_out is None else HeldOut(data.held_out, max(1, steps // 5))
    try:
        trainer = Trainer(
            model,
            loss=loss,
            query=tacit.PerSampleClip(max_norm=s.max_norm),
            sampler=sampler,
            optimizer=optimizer,
            budget=budget,
            noise=Noise(s.noise_multiplier),
            scheduler=_schedule(s, optimizer, steps),
            evaluate_on=held_out,
            callbacks=callbacks,
            ledger=LedgerRun(name=launch.run_name(folder, s, ranks)),
            checkpoint=launch.checkpoint_in(folder, s, with_frozen=False),
            mesh=mesh,
            seed=s.seed,
        )
    except NotPublic as error:
        raise NotPublic(
            "most of the held-out text is training text as well, and figures measured on it would "
            "be released without noise; give other text with --held-out"
        ) from error
    trainer.notes += [*notes, *data.notes, *run_directory.delta_note(budget.delta, size)]
    trainer.config = {
        "settings": to_dict(s),
        "used": {
            "max_length": length,
            "rows_per_record": rows,
            "max_norm": s.max_norm,
            "batch_size": batch,
            "steps": steps,
            "lr": rate,
            "micro_batch": micro,
            "loss": repr(loss),
            "public_size": size,
            "parameters": sum(p.numel() for p in model.parameters()),
            "trained_parameters": sum(p.numel() for p in trained),
        },
    }

    # What can be refused is refused before the ledger admits the run, and leaves no file.
    trainer.rehearse()
    before = Metrics()
    if trainer.evaluate_on is not None:
        with trainer.whole_model():
            before = evaluate(model, trainer.evaluate_on, loss, micro)
    run, ledger = launch.fitted(folder, s, trainer, initial)
    with trainer.whole_model():
        # Every rank evaluates and generates: one that waited for the first could wait too long.
        facts = run.facts(trainer.evaluate_on)
        facts["before"] = before.facts()
        facts["public"] = declared(data.train, None)
        if classes is not None:
            facts["public"].append(f"the classes are {', '.join(classes)}")
        facts["samples"] = []
        if s.prompt:
            drawn: dict[str, Any] = {"new_tokens": s.new_tokens, "temperature": s.temperature}
            texts = models.generate(model, tokenizer, s.prompt, **drawn, seed=s.seed)
            pairs = zip(s.prompt, texts, strict=True)
            facts["samples"] = [{"prompt": prompt, "text": text} for prompt, text in pairs]
        if ledger is not None:  # on the first rank
            _save(folder, s, facts, model, tokenizer, classes, ledger)
    if ledger is not None and run.stopped in ("plan complete", "budget"):
        run_directory.remove_unfinished(folder)
    return facts


def _records(
    s: FinetuneSettings,
    form: TextForm,
    tokenizer: Any,
    lines: list[Any],
    held_out_lines: list[Any] | None,
    device: torch.device,
) -> _Text:
    """The records of both sides, and what the report must say of them."""
    from tacit.data import text
    from tacit.integrations import language_models as models

    notes = []
    groups = text.grouped(lines, s.record)
    held_out_groups = None
    if held_out_lines is not None:
        held_out_groups = text.grouped(held_out_lines, s.record)
    elif s.held_out_fraction is not None:
        groups, held_out_groups = text.split_groups(groups, s.held_out_fraction)
        for side, left in (("training", groups), ("held-out", held_out_groups)):
            if not left:
                raise ValueError(
                    f"--held-out-fraction is {s.held_out_fraction:g}, which leaves no {side} "
                    f"{s.record}; give another share, or a file with --held-out"
                )
    if s.public_size is None:
        notes.append(
            f"the number of {s.record}s was read from the file and is treated as public; declare "
            "it with --public-size"
        )
    # A text that becomes one row is cut by its tokenizer, which keeps the special tokens at its
    # end where a classifier looks for them.
    whole = s.pack or s.record == "document"
    tokenize = models.tokenize_with(tokenizer, None if whole else form.max_length)
    train = form.records(groups, tokenize, public_size=s.public_size or len(groups), name="text")
    held_out = None
    if held_out_groups is not None:
        held_out = form.records(held_out_groups, tokenize, keep_all=True, name="held-out text")
    return _Text(train, held_out, notes)


def _check_prompts(s: FinetuneSettings, tokenizer: Any, context: int | None) -> None:
    from tacit.integrations.language_models import prompt_ids

    for prompt in s.prompt or []:
        size = prompt_ids(tokenizer, prompt).shape[1]
        if context is not None and size + s.new_tokens > context:
            raise ValueError(
                f"a --prompt of {size} tokens and --new-tokens {s.new_tokens} are more than the "
                f"{context} tokens that the model reads; give fewer"
            )


def _schedule(s: FinetuneSettings, optimizer: Any, steps: int) -> Any:
    """Up over the share of warm-up, then down to 0 in a line, or constant."""
    from torch.optim.lr_scheduler import LambdaLR

    rising = math.ceil(s.warmup * steps)

    def factor(step: int) -> float:
        if step < rising:
            return (step + 1) / rising
        return 1.0 if s.schedule == "constant" else (steps - step) / max(1, steps - rising)

    return LambdaLR(optimizer, factor)


def _save(
    folder: Path,
    s: FinetuneSettings,
    facts: dict[str, Any],
    model: StackedRows,
    tokenizer: Any,
    classes: tuple[str, ...] | None,
    ledger: Any,
) -> None:
    """Weights or adapter, tokenizer and card in model/, and the facts of the run beside it."""
    from tacit.integrations.language_models import save_language_model
    from tacit.report.folder_files import (
        FORMAT,
        LANGUAGE_MODEL,
        MODEL_FOLDER,
        digest_of,
        write_json,
    )
    from tacit.report.model_card import model_card
    from tacit.report.privacy_statement import state
    from tacit.report.run_folder import environment, plot_history

    assert s.model is not None
    base = None if Path(s.model).exists() else s.model  # a folder's path is this machine's own
    causal = s.task == "causal"
    facts["environment"] = environment()
    facts["model"] = {
        "format": FORMAT,
        "architecture": {
            "kind": LANGUAGE_MODEL,
            "auto_class": f"AutoModelFor{'CausalLM' if causal else 'SequenceClassification'}",
            "base": s.model,
            "adapter": s.lora > 0,
        },
        "task": s.task,
        "class_names": None if classes is None else list(classes),
    }
    target = folder / MODEL_FOLDER
    names = save_language_model(model, tokenizer, target)
    facts["model"]["files"] = {f"{MODEL_FOLDER}/{n}": digest_of(target / n) for n in names}
    if facts["history"]:
        plot_history(facts, folder / "progress.png")
    statement = state(facts, ledger)
    facts["statement"] = dict(statement.content)
    card = model_card(statement, facts, base, adapter=s.lora > 0)
    (target / "README.md").write_text(card, encoding="utf-8")
    for place in (folder, target):  # beside the facts, and beside the weights that are given away
        statement.save(place)
    write_json(facts, folder / "run.json")


def _print(facts: dict[str, Any], folder: Path) -> None:
    from rich.console import Console
    from rich.markup import escape

    from tacit.report.model_card import promise
    from tacit.training.run import summary_table

    console = Console()
    console.print(summary_table(facts))
    before = facts["before"]
    measured = [
        f"{name} {float(before[name]):{form}} → {float(facts[name]):{form}}"
        for name, form in (("perplexity", ".4g"), ("accuracy", ".2%"))
        if before.get(name) is not None and facts.get(name) is not None
    ]
    told = [promise(facts)]
    if measured:
        told.append(f"held-out text, before → after: {', '.join(measured)}")
    told += [f"{sample['prompt']}▸{sample['text']}" for sample in facts["samples"]]
    told.append(f"written to {folder}/; the model, with its card, is in {folder}/model/")
    if launch.is_unfinished(folder):
        told.append(f"the run is not complete; resume it with: tacit finetune --resume {folder}")
    for line in told:
        console.print(escape(line), highlight=False, soft_wrap=True)


finetune_command = command_of(FinetuneSettings, finetune, launch.ended_meanwhile)
