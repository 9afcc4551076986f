"""The settings of `tacit train`: each option once, in the section under which it is shown.

`tacit train --help`, `--config run.toml`, the settings in run.json and docs/reference/train.md are
all made from these classes; `tacit.cli.schema` says how.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from tacit.cli.run_settings import BudgetOptions, FolderOptions, StepOptions
from tacit.cli.schema import (
    BELOW_ONE,
    FACTOR,
    LIMIT,
    NOISE,
    NORM,
    ONE_OR_MORE,
    POSITIVE,
    RELEASED,
    SHARE,
    Rule,
    option,
    overridden,
    section,
)

# The networks that Tacit registers; a test compares the two.
MODELS = (
    "default", "linear", "mlp", "mnist-cnn", "cifar-cnn", "convnet", "lenet", "lenet5", "vgg",
    "mlp-mixer", "resnet8", "resnet18", "wide-resnet", "lipschitz-linear", "lipschitz-mlp",
    "lipschitz-lenet", "lipschitz-vgg", "lipschitz-resnet", "lipschitz-mixer",
)  # fmt: skip
# The registered losses of tables and images; tests compare this with the registry.
LOSSES = (
    "cross-entropy", "tailored", "focal", "hinge", "hinge-kantorovich-rubinstein",
    "kantorovich-rubinstein", "cosine-similarity", "scaled-cross-entropy", "binary-cross-entropy",
    "scaled-binary-cross-entropy", "multi-label-cross-entropy", "huber", "mean-squared",
    "mean-absolute", "sum-squared", "sum-absolute", "sum-huber",
)  # fmt: skip
USUAL_DATASET = "digits"
BY_RECIPE = "depends on dataset and query"

_OF_FILE = Rule("data")


@section("data", "Data")
class DataSettings:
    dataset: str | None = option(
        "A named dataset; `tacit data` lists them.",
        usual=USUAL_DATASET,
        not_with=Rule("data", (), "and a run has one of them"),
        common=True,
    )
    data: Path | None = option(
        "A table of your own: .csv, .tsv, .parquet or .npz.",
        common=True,
    )
    schema: Path | None = option(
        "File that says what the columns of --data mean; `tacit data describe` makes one.",
        usual="every column but the target is a number",
        goes_with=_OF_FILE,
        common=True,
    )
    target: str | None = option(
        "Column (or array) of --data to predict: it holds the classes, or is what --schema says.",
        usual="that of --schema",
        goes_with=_OF_FILE,
        common=True,
    )
    test_data: Path | None = option(
        "File of held-out records to evaluate on.", usual="a share of --data", goes_with=_OF_FILE
    )
    classes: tuple[str, ...] | None = option(
        "Classes of --data, declared public: a,b,c.",
        form="their names, such as a,b,c",
        goes_with=_OF_FILE,
        not_with=Rule("schema", (), "which declares them"),
    )
    public_size: int | None = option(
        "Number of records in --data, declared public.",
        goes_with=Rule("data", (), "and the size of a named dataset is known"),
    )
    feature_range: tuple[float, float] | None = option(
        "Range of the features of --data, declared public: lower,upper.",
        form="lower,upper such as 0,255",
        goes_with=_OF_FILE,
        not_with=Rule("schema", (), "which declares a range for each column"),
    )
    range_noise: float | None = option(
        "Noise multiplier with which the ranges of columns that nobody declared are released; the "
        "ledger charges it. 0 leaves such columns unscaled.",
        usual="such that training has about 5% more noise",
        range=NOISE,
        goes_with=_OF_FILE,
        not_with=Rule("feature_range", (), "which declares the range"),
    )
    category_noise: float | None = option(
        "Count how often each category of --schema occurs, with this noise multiplier, which the "
        "ledger charges. Rare categories of a column share one input.",
        usual="categories are not counted",
        range=RELEASED,
        goes_with=Rule("schema", (), "which declares the categories"),
    )
    rare_below: float | None = option(
        "Noisy count below which a category is rare.",
        usual="1% of the records, or 4 standard deviations of the noise if they are more",
        range=POSITIVE,
        goes_with=Rule("category_noise"),
    )
    unit_norm: bool = option("Divide each record by its own norm. Costs no privacy.", False)
    scale_noise: float | None = option(
        "Standardise --data, or scattering features. Their mean and standard deviation are "
        "released with this noise multiplier, which the ledger charges.",
        range=NOISE,
    )
    features: Literal["as-they-are", "scattering", "mirrored-scattering"] = option(
        "Fixed features of images, computed once and kept in the cache.", "as-they-are"
    )
    public_share: float | None = option(
        "Share of the records to set aside as public, and not protect. --layerwise, --groups and "
        "--statistics public use them.",
        usual="0.1",
        range=SHARE,
        goes_with=Rule("query", ("clip", "batch-clip")),
    )


@section("privacy", "Privacy")
class PrivacySettings(BudgetOptions):
    relation: Literal["add-or-remove-one", "replace-one"] | None = option(
        "Which datasets are neighbours. Noise multipliers are relative to the sensitivity under "
        "this relation.",
        usual="add-or-remove-one for Poisson sampling, else replace-one",
    )
    sampling: Literal["poisson", "fixed-size", "shuffle"] | None = option(
        "How batches are drawn. fixed-size and shuffle need --relation replace-one.",
        usual="poisson",
        goes_with=Rule("query", ("clip", "clipless"), "which draws mini-sets, fixed by record id"),
    )
    max_batch_size: int | None = option(
        "Largest batch. Of a larger draw a random subset takes part, and epsilon counts that.",
        usual="no limit",
        range=ONE_OR_MORE,
        not_with=Rule("sampling", ("fixed-size", "shuffle"), "whose batches have a fixed size"),
        goes_with=Rule("query", ("clip", "clipless"), "which draws mini-sets, fixed by record id"),
    )
    noise: Literal["global", "per-layer", "optimised"] | None = option(
        "How the noise is shared over blocks of parameters.",
        usual="per-layer for several blocks of batch-clip or of --layerwise, else global",
    )


@section("model", "Model and loss")
class ModelSettings:
    model: str = option(
        "Network to train, or the name of one that you registered (tacit --plugin FILE train).",
        "default",
        choices=MODELS,
        open_choices=True,
        common=True,
    )
    loss: str | None = option(
        f"Loss to minimise: {', '.join(LOSSES)}, or one that you registered (tacit --plugin FILE "
        "train).",
        usual="cross-entropy; for several labels multi-label-cross-entropy, for numbers huber",
    )
    temperature: float | None = option(
        "Temperature of the loss, such as cross-entropy's.", usual=BY_RECIPE, range=POSITIVE
    )
    threshold_epoch: float | None = option(
        "tailored: epoch at which squared error and focal loss weigh the same.", usual=BY_RECIPE
    )
    beta: float | None = option(
        "tailored: divisor of the penalty on pre-activations; sum-huber: error at which it turns "
        "linear.",
        usual="depends on loss and dataset",
    )
    gamma: float | None = option(
        "tailored, focal: how strongly well-fitted records are down-weighted.",
        usual="depends on loss and dataset",
    )


@section("query", "Gradient query")
class QuerySettings:
    query: Literal["clip", "batch-clip", "clipless"] = option(
        "How the gradient is bounded.", "clip", common=True
    )
    adaptive_quantile: float | None = option(
        "Adapt the clipping norm to this quantile of the gradient norms, privately.",
        range=SHARE,
        not_with=Rule("gradient_clip", (0.0,), "which sets no limit to start from"),
    )
    augment: int | None = option(
        "Average each record's gradient over this many random crops and flips of its image.",
        range=ONE_OR_MORE,
    )
    engine: Literal["automatic", "book-keeping", "per-record", "set-by-set"] = option(
        "How gradients are computed: per-record works with clip only, set-by-set with batch-clip "
        "only.",
        "automatic",
    )


_OF_BLOCKS = Rule(
    "blocks", ("layer", "parameter"), "and a gradient that is clipped whole is one block"
)


@section("clipping", "Clipping (--query clip or batch-clip)", Rule("query", ("clip", "batch-clip")))
class ClippingSettings:
    max_norm: float | None = option(
        "Clipping norm C; with --layerwise, the master constant that the blocks share.",
        usual=BY_RECIPE,
        range=NORM,
        not_with=Rule(
            "layerwise", ("original",), "which clips each block to its own norm on public records"
        ),
    )
    rule: Literal["clip", "normalise"] | None = option(
        "clip shortens long gradients to the norm; normalise scales all of them to it.",
        usual="clip",
    )
    blocks: Literal["flat", "layer", "parameter"] | None = option(
        "Parameters that are clipped together: all of them (flat), each layer, or each parameter.",
        usual="flat",
    )
    layerwise: Literal["none", "original", "enhanced", "factors"] = option(
        "Set the blocks' constants from their gradient norms on public records: original (those "
        "norms), enhanced (--max-norm, shared out in proportion), factors (scale the layers, then "
        "clip once).",
        "none",
        goes_with=_OF_BLOCKS,
        not_with=Rule(
            "adaptive_quantile",
            (),
            "and the one takes constants from public records, the other from private counts",
        ),
    )
    groups: int | None = option(
        "Merge blocks of similar gradient norm on public records into this many.",
        range=ONE_OR_MORE,
        goes_with=_OF_BLOCKS,
    )
    master_decay: float | None = option(
        "Multiply the master constant by this after every epoch.",
        range=FACTOR,
        goes_with=Rule("layerwise", ("enhanced", "factors"), "which has no master constant"),
    )
    sparsify: int | None = option(
        "Every so many steps, freeze weights whose gradients did not rise above the noise.",
        range=ONE_OR_MORE,
    )


@section("clipless", "Clipless (--query clipless)", Rule("query", ("clipless",)))
class CliplessSettings:
    gradient_clip: float | None = option(
        "Limit on the norm of each record's loss gradient in the outputs; 0 for no limit.",
        usual=BY_RECIPE,
        range=LIMIT,
    )


_RANDOM_SETS = "which makes the number of mini-sets random"
_LOCAL = Rule("local")


@section("batch_clipping", "Batch clipping (--query batch-clip)", Rule("query", ("batch-clip",)))
class BatchClippingSettings:
    mini_set_size: int | None = option("Records in a mini-set.", usual=BY_RECIPE, range=ONE_OR_MORE)
    mini_sets: int | None = option(
        "Mini-sets in a step.",
        usual=BY_RECIPE,
        range=ONE_OR_MORE,
        not_with=Rule("mini_set_rate", (), _RANDOM_SETS),
    )
    mini_set_rate: float | None = option(
        "Draw each mini-set with this probability, instead of a fixed number of them.", range=FACTOR
    )
    local: Literal["sgd", "momentum", "adam"] | None = option(
        "Run this optimizer over each mini-set, and clip the change that it makes to the weights.",
        not_with=Rule("engine", ("book-keeping",), "which knows mean gradients alone"),
    )
    local_lr: float | None = option(
        "Learning rate of --local.",
        range=POSITIVE,
        goes_with=_LOCAL,
        needed="a learning rate above 0",
    )
    local_batch: int | None = option(
        "Records in each step of --local.", usual="1", range=ONE_OR_MORE, goes_with=_LOCAL
    )
    statistics: Literal["public", "released", "convert"] | None = option(
        "BatchNorm's statistics: taken from public records, released with noise, or none (convert "
        "it to GroupNorm).",
    )
    statistics_noise: float | None = option(
        "Noise multiplier of released statistics; the ledger charges the release.",
        range=NOISE,
        goes_with=Rule("statistics", ("released",)),
        needed="a noise multiplier such as 10, which is charged before the first step",
    )


@section("training", "Training")
class TrainingSettings(StepOptions):
    batch_size: int | None = overridden(
        help="Expected number of records in a batch; batch-clip: in all its mini-sets.",
        usual=BY_RECIPE,
        not_with=Rule("mini_set_rate", (), _RANDOM_SETS),
    )
    epochs: float | None = overridden(usual=BY_RECIPE)
    lr: float | None = overridden(usual=BY_RECIPE)
    optimizer: Literal["sgd", "adam"] = option("Optimizer.", "sgd")
    momentum: float | None = option(
        "Momentum of SGD.",
        usual="0.9",
        range=BELOW_ONE,
        goes_with=Rule("optimizer", ("sgd",), "which has no momentum"),
    )
    schedule: Literal["constant", "cosine"] | None = option(
        "Learning-rate schedule.", usual="cosine for clipless, else constant"
    )
    ema: float | None = option(
        "Decay of a moving average of the weights, which is what is evaluated and saved.",
        range=BELOW_ONE,
    )
    max_physical_batch: int = option(
        "Largest number of records to process at once. It affects memory, not results.",
        512,
        range=ONE_OR_MORE,
        with_resume=True,
    )


@section("output", "Output")
class OutputSettings(FolderOptions):
    held_out: Path | None = option(
        "File for the rows of --data that are held out, counted from 0. It is for the owner of the "
        "data alone: epsilon does not cover it.",
        usual="not written",
        goes_with=_OF_FILE,
        not_with=Rule("test_data", (), "which names the records that are held out"),
    )
    diagnostics: bool = option(
        "Record gradient norms and clipping rates of training records in diagnostics.json, for the "
        "page of tacit report. They are not private: no ε covers them.",
        False,
        goes_with=Rule("query", ("clip", "clipless"), "which bounds mini-sets, not records"),
        with_resume=True,
    )


@dataclass(frozen=True)
class TrainSettings(
    DataSettings,
    PrivacySettings,
    ModelSettings,
    QuerySettings,
    ClippingSettings,
    CliplessSettings,
    BatchClippingSettings,
    TrainingSettings,
    OutputSettings,
):
    """Everything that `tacit train` can be told."""

    command: ClassVar[str] = "train"
