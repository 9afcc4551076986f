"""The engine that is used where none is named: recorded where that is safe, else as it is."""

from __future__ import annotations

from torch import Tensor

from tacit.batch import Batch
from tacit.cuda_graph import CaptureFailed
from tacit.queries.engines.book_keeping import BookKeeping
from tacit.queries.engines.replay import Replay
from tacit.queries.engines.task import Clipped, Task
from tacit.queries.engines.when_to_record import WhenToRecord


class Automatic:
    """`Replay` on a GPU for models that can surely be recorded (`recordable`), else `BookKeeping`.

    The sums are the same; `WhenToRecord` says which.
    """

    def __init__(self) -> None:
        self.eager = BookKeeping()
        self._replay = Replay(self.eager, after=1)
        self._when = WhenToRecord()

    def clipped_sums(self, task: Task, piece: Batch) -> Clipped:
        shaped = self._when.shaped(task.model, task.loss, piece, task.views)
        if shaped is not None:
            try:
                return self._replay.clipped_sums(task, shaped)
            except CaptureFailed as error:
                self._when.failed(task.model, error)
        return self.eager.clipped_sums(task, piece)

    def block_norms(self, task: Task, piece: Batch) -> list[Tensor]:
        return self.eager.block_norms(task, piece)

    def forget(self) -> None:
        """Give the recordings' memory back; later steps record anew."""
        self._replay.forget()
        self._when.forget()
