"""Where the rows of a finished stage are: in which shard, at which place of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class RowIndex:
    """Row numbers of a whole stage.

    >>> index = RowIndex.of({"shards": [{"rows": 3}, {"rows": 2}]})
    >>> len(index), index.find(2), index.find(3)
    (5, (0, 2), (1, 0))
    """

    starts: NDArray[np.int64]  # of every shard, and the end

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> "RowIndex":
        return cls(np.cumsum([0, *(entry["rows"] for entry in manifest["shards"])]))

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def shards(self) -> int:
        return len(self.starts) - 1

    def find(self, row: int) -> tuple[int, int]:
        """Turn a row of the stage into (shard, row of the shard)."""
        shard = int(np.searchsorted(self.starts, row, side="right")) - 1
        return shard, row - int(self.starts[shard])
