"""What all stores of label maps share: maps by image index, checked against the data, with a policy for bad ones."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from threading import get_ident

from tlt.errors import UserError
from tlt.io.names import Names
from tlt.io.text import printable
from tlt.label_map import FULL_AREA, NO_AREA, Area, LabelMap, centre_square
from tlt.labels.label_files import published_label_name
from tlt.labels.metadata import AREAS, TreeMetadata

BAD_LABEL_POLICIES = ("stop", "skip", "uniform")


class LabelStore:
    """The label maps of a list of images; `tlt.data.dataset.LabelReader` by `read` and `take_faults`.

    Args:
        root: Where the maps are.
        names: Image paths relative to the image folder, in row order.
        num_classes: Class ids must be below it.
        bad_label: What a missing or unusable map means. `"stop"`: an error. `"skip"`: a map that covers nothing, so
            that the image is trained on its class alone. `"uniform"`: every class equally likely everywhere.
        published_names: Find labels by the published rule alone (`tlt.labels.label_files.published_label_name`).
    Stores also take `area`: `"full"` or `"center"`, what part of the images the maps cover (None: as the store says,
    else full), and `class_names`, compared with the store's, if it has any.

    Attributes:
        metadata: How the maps were made, or None.
        area: What part of the images the maps cover.
        shape: (k, h, w) of every map.
        warnings: One line each, for rank 0 to print once.
    """

    area: str | Area
    shape: tuple[int, int, int]

    def __init__(
        self,
        root: str | Path,
        names: Sequence[str],
        num_classes: int | None,
        bad_label: str,
        published_names: bool = False,
    ) -> None:
        if bad_label not in BAD_LABEL_POLICIES:
            raise UserError(f"--bad-label {bad_label} is none of {', '.join(BAD_LABEL_POLICIES)}")
        self.root, self.num_classes, self.bad_label = os.fspath(root), num_classes, bad_label
        self.published_names = published_names
        self.warnings: list[str] = []
        self.metadata: TreeMetadata | None = None
        self._names = names if isinstance(names, Names) else Names(names)
        self._faults: dict[int, list[tuple[str, str]]] = {}  # by thread
        self._missing: set[int] = set()

    def __len__(self) -> int:
        return len(self._names)

    def load(self, index: int, width: int | None = None, height: int | None = None) -> LabelMap:
        """The map of image `index`, which is not missing, whatever the policy. Raises UserError."""
        raise NotImplementedError

    def source(self, index: int) -> str:
        """Where the map of image `index` is, for messages."""
        raise NotImplementedError

    def identity(self) -> bytes:
        """What a checkpoint knows these labels by, besides shape and area: the text that describes them. An archive's
        holds checksums of its files; a published tree may have none."""
        files = (Path(self.root) / name for name in ("manifest.json", "labels.json"))
        return b"".join(file.read_bytes() for file in files if file.is_file())

    def missing(self) -> list[int]:
        """Images without a map."""
        return sorted(self._missing)

    def read(self, index: int, width: int | None = None, height: int | None = None) -> LabelMap:
        """The map of image `index`, of shape `self.shape`.

        Args:
            width, height: Size of the source image, needed where the maps cover its centred square.

        Raises:
            UserError: The map is unusable and the policy is `"stop"`.
        """
        if index in self._missing:
            return self._replacement()
        try:
            label_map = self.load(index, width, height)
            if label_map.shape != self.shape:
                raise UserError(f"{self.source(index)}: {self._shapes(label_map.shape)}")
        except UserError as error:
            if self.bad_label == "stop":
                raise
            self._faults.setdefault(get_ident(), []).append((self._names[index], str(error)))
            return self._replacement()
        return label_map

    def take_faults(self) -> list[tuple[str, str]]:
        """(image, reason) of the maps replaced by `read` since the last call, in this thread."""
        return self._faults.pop(get_ident(), [])

    def _replacement(self) -> LabelMap:
        return LabelMap.unknown(self.shape, FULL_AREA if self.bad_label == "uniform" else NO_AREA)

    def _shapes(self, shape: tuple[int, int, int]) -> str:
        return f"shape (k, h, w) = {shape}, but the tree's is {self.shape}; make it again with the others' settings"

    def _area_of(self, width: int | None, height: int | None) -> Area:
        if not isinstance(self.area, str):
            return self.area
        if self.area == "full":
            return FULL_AREA
        if not width or not height:
            raise ValueError("maps of the centred square can only be placed with the size of the source image")
        return centre_square(width, height)

    def _resolve_area(self, asked: str | None, recorded: str | Area) -> None:
        if asked is not None and asked not in AREAS:
            raise UserError(f"--token-label-area {asked} is none of {', '.join(AREAS)}")
        if asked is not None and self.metadata is not None and asked != recorded:
            self.warnings.append(
                f"--token-label-area {asked} overrides {recorded} of {printable(self.root)}/labels.json"
            )
        self.area = asked or recorded

    def _compare(self, class_names: Sequence[str] | None) -> None:
        metadata, where = self.metadata, f"--token-label-data {printable(self.root)}"
        if metadata is None:
            return
        if self.num_classes is not None and metadata.num_classes != self.num_classes:
            raise UserError(
                f"{where} has labels of {metadata.num_classes} classes, but the model has {self.num_classes}: give "
                f"--num-classes {metadata.num_classes} or make labels with an annotator for {self.num_classes} classes"
            )
        if class_names is None or metadata.class_names is None or list(class_names) == metadata.class_names:
            return
        pairs = enumerate(zip(metadata.class_names, class_names, strict=False))
        first = next((f"class {i} is {printable(a)} there, {printable(b)} here" for i, (a, b) in pairs if a != b), "")
        counts = f"{len(metadata.class_names)} classes there, {len(class_names)} here"
        raise UserError(f"{where} was made for other class folders ({first or counts}); make labels for this data set")

    def _usual_label(self, name: str) -> str:
        return published_label_name(name) if self.published_names else os.path.splitext(name)[0] + ".pt"

    def _refuse_missing(self, names: Sequence[str]) -> None:
        known = set(self.metadata.skipped) if self.metadata else set()
        missing = [names[index] for index in self.missing() if names[index] not in known]
        if not missing:
            return
        text = (
            f"{len(missing)} of {len(names)} images have no label in {printable(self.root)}, the first is "
            f"{printable(missing[0])} (looked for {printable(self._usual_label(missing[0]))})"
        )
        if len(missing) == len(names):
            raise UserError(f"{text}; these labels are of another data set, or not complete")
        if self.bad_label == "stop" or len(self._missing) == len(names):
            raise UserError(
                f"{text}; make labels with generate_label.py, or use --bad-label skip if some may be missing"
            )
        self.warnings.append(f"{text}; --bad-label {self.bad_label}")
