"""Files of many images that a split of a data set consists of, read through an index that lies beside them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from tlt.data.sources.shards import ShardedImages, open_shards
from tlt.errors import UserError
from tlt.io.text import printable


@dataclass(frozen=True)
class IndexedFiles:
    """The files of a split.

    Attributes:
        paths: Of the files, in order.
        index: Of their index.
    """

    paths: list[str]
    index: str

    def make_index(self, workers: int = 1) -> list[str]:
        """Read every byte of the files and write the index. Returns lines that say what was found.

        Raises:
            UserError: A file is cut or damaged, or holds something else.
        """
        raise NotImplementedError

    def open(self, class_names: Sequence[str] | None = None) -> ShardedImages:
        """The images.

        Args:
            class_names: Imposed class list; None: the index's own.

        Raises:
            UserError: No index, or it is stale; and as `tlt.data.sources.shards.open_shards`.
        """
        if not os.path.isfile(self.index):
            raise UserError(
                f"{printable(self.index)}, the index of {len(self.paths)} files such as {printable(self.paths[0])}, "
                "is missing: make it with `tlt index DATA --split SPLIT --dataset KIND`"
            )
        source = open_shards(self.index, class_names)
        indexed = source.index.shards.paths
        if list(map(os.path.abspath, indexed)) != list(map(os.path.abspath, self.paths)):
            raise UserError(
                f"{printable(self.index)} is of {len(indexed)} files, not of the {len(self.paths)} that are there: "
                "make it anew with `tlt index DATA --split SPLIT --dataset KIND`"
            )
        return source
