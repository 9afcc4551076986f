"""Data as `Records`: tensors, with the constants about them that are public.

`load` reads a named dataset and `load_file` a user's own table, whose columns a `Schema` may
declare; `open_file` leaves a large one on disk. `read_lines` and `TextForm` make records of text:
of lines, documents or users. Scalers rescale each record with public constants, or with those that
`release_statistics` and its relatives release with noise and charge. `Preprocessing` keeps what a
run's inputs went through in the run's folder.
"""

from tacit.data.augmentation import Augmentation, RandomCropFlip
from tacit.data.catalogue import available, register_dataset
from tacit.data.columnar import open_file
from tacit.data.loading import load
from tacit.data.preprocessing import Preprocessing, load_preprocessing
from tacit.data.private_counts import MergedCategories, release_category_counts
from tacit.data.private_ranges import ColumnRanges, release_ranges
from tacit.data.private_scaling import release_channel_scaler, release_statistics
from tacit.data.scaling import PublicScaler, RangeScaler, UnitNorm
from tacit.data.splits import split_public
from tacit.data.table_columns import Boolean, Categorical, Date, Ignored, Numeric
from tacit.data.table_description import describe
from tacit.data.table_schema import Schema
from tacit.data.tables import load_file
from tacit.data.text import TextForm, TextLine, read_lines
from tacit.records import Records, as_records
from tacit.sources import RowSource

__all__ = [
    "Augmentation",
    "Boolean",
    "Categorical",
    "ColumnRanges",
    "Date",
    "Ignored",
    "MergedCategories",
    "Numeric",
    "Preprocessing",
    "PublicScaler",
    "RandomCropFlip",
    "RangeScaler",
    "Records",
    "RowSource",
    "Schema",
    "TextForm",
    "TextLine",
    "UnitNorm",
    "as_records",
    "available",
    "describe",
    "load",
    "load_file",
    "load_preprocessing",
    "open_file",
    "read_lines",
    "register_dataset",
    "release_category_counts",
    "release_channel_scaler",
    "release_ranges",
    "release_statistics",
    "split_public",
]
