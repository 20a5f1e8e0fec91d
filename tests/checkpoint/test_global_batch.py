"""The global batch on another number of processes, and data that are not the checkpoint's."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tlt.data.augment.index_stream import IndexStream
from tlt.data.sources.folder import ImageFolder
from tlt.errors import UserError
from tlt.io.names import Names
from volo.checkpoint.resume import DATA_KEY, batch_record, check_same_data, fingerprint, steps_to_keep


@pytest.mark.parametrize(
    ("before", "now", "steps", "told"),
    [
        ((8, 1, 8), (8, 1, 8), 1, None),
        (
            (8, 1, 8),
            (8, 1, 4),
            2,
            "8 processes before, 4 now: 2 accumulation steps, not 1, keep the global batch of",
        ),
        ((8, 4, 1), (8, 4, 4), 1, "keep the global batch of 32"),
        ((8, 1, 8), (4, 4, 4), 4, None),
        ((8, 1, 8), (8, 1, 3), 1, "was 64, it is 24 now; 3 processes can't share 64 images evenly"),
        ((12, 1, 4), (12, 1, 3), 1, "was 48, it is 36 now; -b 8 --grad-accum-steps 2 would keep it"),
        ((8, 1, 8), (4, 1, 8), 1, "was 64, it is 32 now; -b 4 --grad-accum-steps 2 would keep it"),
    ],
)
def test_fault_13_the_global_batch_is_kept_or_the_change_is_told(
    before: Any, now: Any, steps: int, told: str | None
) -> None:
    kept, message = steps_to_keep({"batch": batch_record(*before, before[1])}, *now)
    assert kept == steps
    assert (told is None and message is None) or (told is not None and message is not None and told in message)


def test_fault_13_the_images_of_every_update_are_the_same() -> None:
    """Four processes, and two with twice the accumulation steps: the union over the ranks, update by update."""

    def updates(world_size: int, micro_batches: int) -> list[list[int]]:
        ranks = [IndexStream(43, 8, 3, world_size, rank, micro_batches).epoch(1) for rank in range(world_size)]
        return [
            sorted(int(i) for parts in update for i in np.concatenate(parts)) for update in zip(*ranks, strict=True)
        ]

    assert updates(4, 1)[:5] == updates(2, 2)[:5]


def folder(paths: list[str], classes: list[int], names: list[str]) -> ImageFolder:
    return ImageFolder("/data/train", paths, np.array(classes), names)


def test_a_fingerprint_is_the_sha256_of_a_line_for_each_image() -> None:
    paths, classes = ["a/1.jpg", "b/1.jpg", "a/\udcff.jpg", "a/2.jpg", "b/2.jpg"], [0, 11, 0, 0, 11]
    lines = b"a\0b" + b"".join(b"\n%s\0%d" % pair for pair in zip(map(os.fsencode, paths), classes, strict=True))
    for names in (paths, Names(paths)):
        images = ImageFolder("/data", names, np.array(classes), ["a", "b"])
        assert fingerprint(images, None)["images"] == hashlib.sha256(lines).hexdigest()


def test_other_data_are_refused_unless_they_are_allowed() -> None:
    images = folder(["a/1.jpg", "b/1.jpg", "b/\udcff.jpg"], [0, 1, 1], ["a", "b"])
    mine = fingerprint(images, None)
    saved = {DATA_KEY: mine}
    assert check_same_data(saved, fingerprint(replace(images, root="/elsewhere"), None), "x", False) == []
    assert check_same_data({}, mine, "x", False) == []
    for other in (
        folder(["a/1.jpg", "b/1.jpg"], [0, 1], ["a", "b"]),
        folder(["a/1.jpg", "b/2.jpg", "b/\udcff.jpg"], [0, 1, 1], ["a", "b"]),
        folder(images.paths, [0, 0, 1], ["a", "b"]),
        folder(images.paths, [0, 1, 1], ["a", "c"]),
    ):
        now = fingerprint(other, None)
        with pytest.raises(UserError, match="the training images .* are not those that x was .*--allow-changed-data"):
            check_same_data(saved, now, "x", False)
        assert "warning: the training images" in check_same_data(saved, now, "x", True)[0]
    now = mine | {"labels": "other"}
    with pytest.raises(UserError, match="^the token labels are not those"):
        check_same_data(saved, now, Path("x"), False)
