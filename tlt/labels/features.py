"""The feature archive: the last map of a teacher for each whole image, a folder of NumPy files (`tlt.labels.rows`).

OUT/meta.json       also has `FeatureInfo`
OUT/features.npy    int8 or float16 (N, h, w, D)
OUT/scale.npy       float32 (N, h, w), beside int8: a cell's features are its numbers times this
OUT/basis.npy       float32 (C, D), where fewer channels are stored than the C of the teacher: orthonormal columns, the
                    principal directions of the teacher's features; stored are the features times this matrix
OUT/kept.npy        float32 (D,), beside it: the share of the features' squared sizes in each direction

A teacher that sees whole images without augmentation gives the same map in every epoch. Where a token looks in it
follows from crop, flip and warp, as with a label map, so the stored map teaches what the teacher itself would.
"""

import io
import json
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tlt.data.batch import FeatureBatch
from tlt.errors import MachineFault, UserError, in_range, one_of
from tlt.io.files import blamed_on, read_bytes, write_whole
from tlt.io.names import Names
from tlt.io.output_folder import META_NAME
from tlt.io.text import printable
from tlt.label_map import FULL_AREA, Area
from tlt.labels.label_info import area_in_shares
from tlt.labels.row_writer import RowWriter
from tlt.labels.rows import REMEDY, ArchiveKind, Columns, RowReader, map_file
from tlt.labels.store import BAD_LABEL_POLICIES, check_missing

DTYPES = ("int8", "float16")
_BASIS = ("basis.npy", "kept.npy")
_LARGEST = 127  # of int8


@dataclass(frozen=True)
class FeatureInfo:
    """The description that all feature maps of an archive share."""

    grid: tuple[int, int]  # h and w of a map
    channels: int  # D, as stored
    dtype: str = "int8"
    area: Area = FULL_AREA  # the part of the image that the map covers, in shares of the image
    teacher: dict[str, Any] = field(default_factory=dict)  # the network, with its settings
    teacher_channels: int | None = None  # C, where fewer are stored
    basis_crc32: int | None = None  # of the bytes of basis and shares
    # Unreadable images, which have no map; paths relative to the image folder.
    skipped: list[str] = field(default_factory=list)

    @property
    def row_bytes(self) -> int:
        """Bytes of one image in the archive, with its checksum and state."""
        cells = self.grid[0] * self.grid[1]
        return cells * (self.channels + 4 if self.dtype == "int8" else 2 * self.channels) + 5

    @property
    def text(self) -> str:
        """What the features of one image are, in words."""
        channels = f"{self.channels} of {self.teacher_channels}" if self.teacher_channels else f"{self.channels}"
        return (
            f"{self.grid[0]} x {self.grid[1]} tokens of {channels} channels in {self.dtype}, "
            f"{self.row_bytes / 1e3:.1f} KB an image"
        )

    @classmethod
    def from_json(cls, content: dict[str, Any], path: str | Path) -> "FeatureInfo":
        """Return the description in the JSON object of a file `path`; other entries are ignored. Raise UserError."""
        with blamed_on(path):
            info = cls(**{item.name: content[item.name] for item in fields(cls) if item.name in content})
            rows, cols = info.grid
            info = replace(info, grid=(rows, cols), teacher=dict(info.teacher))
            counts = rows, cols, info.channels
            if not all(isinstance(count, int) and 0 < count < 2**31 for count in counts) or info.dtype not in DTYPES:
                raise ValueError(f"{counts} {info.dtype} can't be those of feature maps")
            return replace(info, area=area_in_shares(info.area))


def _columns(info: FeatureInfo) -> Columns:
    shape = (*info.grid, info.channels)
    if info.dtype == "float16":
        return {"features": (shape, ("<f2",))}
    return {"features": (shape, ("|i1",)), "scale": (info.grid, ("<f4",))}


FEATURES = ArchiveKind(
    "features", "volo-tlt feature archive, version 1", "`volo features`", FeatureInfo.from_json, _columns
)


def is_feature_archive(path: str | Path) -> bool:
    """Return whether a folder is a feature archive, of any version, perhaps an incomplete one."""
    with suppress(OSError, ValueError, RecursionError):
        content = json.loads(read_bytes(Path(path, META_NAME)))
        return isinstance(content, dict) and str(content.get("format")).startswith(FEATURES.format.partition(",")[0])
    return False


class FeatureStore(RowReader[FeatureInfo]):
    """The feature maps of a list of images; a `tlt.data.dataset.FeatureReader`. `open_features` makes one.

    Attributes:
        names: Image paths relative to the image folder, in index order.
        warnings: Warnings of one line each.
    """

    kind = FEATURES

    def __init__(self, root: str, names: Names, bad_label: str = "stop") -> None:
        super().__init__(root, names)
        self.names = names
        self.bad_label = bad_label
        if self.info.basis_crc32 is not None:
            read_basis(root, self.info)
        self.warnings = check_missing(self, names, bad_label, FEATURES.one, "volo features")
        self._faults: list[tuple[str, str]] = []

    @property
    def key(self) -> str:
        """The name of these features in `Batch.features`."""
        return self.root

    def read(self, index: int) -> np.ndarray:
        """Return the map of image `index`, which is not missing, as float32 (h, w, D). Raise UserError if it is
        damaged."""
        arrays = self.read_row(index)
        values = arrays["features"].astype(np.float32)
        return values * arrays["scale"][..., None] if "scale" in arrays else values

    def batch(self, indices: Sequence[int]) -> FeatureBatch:
        """Return the maps of images as they are stored. A map that is missing or damaged is left out; with `bad_label`
        "stop" a UserError is raised."""
        types = FEATURES.columns(self.info).items()
        stacked = {name: np.zeros((len(indices), *shape), dtypes[0]) for name, (shape, dtypes) in types}
        present = np.zeros(len(indices), bool)
        for position, index in enumerate(indices):
            if index in self.missing:  # which `check_missing` has told
                continue
            try:
                arrays = self.read_row(index)
            except UserError as error:
                if self.bad_label == "stop" or isinstance(error, MachineFault):
                    raise
                self._faults.append((self.names[index], str(error)))
                continue
            present[position] = True
            for name, array in arrays.items():
                stacked[name][position] = array
        tensors = {name: torch.from_numpy(array) for name, array in stacked.items()}
        return FeatureBatch(tensors["features"], torch.from_numpy(present), tensors.get("scale"))

    def take_faults(self) -> list[tuple[str, str]]:
        """Return (image, reason) for each map that `batch` has left out since the last call, but for missing ones."""
        faults = self._faults
        self._faults = []
        return faults


def open_features(path: str | Path, names: Sequence[str], bad_label: str = "stop") -> FeatureStore:
    """Open the stored features of a list of images, which `volo features` has written.

    Args:
        path: The folder of the archive.
        names: Image paths relative to the image folder, in index order.
        bad_label: What to do if a map is missing or damaged. "stop": raise an error. "skip" and "uniform": that image
            learns nothing from this teacher.

    Raises:
        UserError: There is no feature archive, it is incomplete, damaged or of another version, or of other images.
    """
    one_of("--bad-label", bad_label, BAD_LABEL_POLICIES)
    return FeatureStore(str(path), names if isinstance(names, Names) else Names(names), bad_label)


def quantised(features: Tensor, dtype: str) -> dict[str, np.ndarray]:
    """Return the columns of features (..., h, w, D): float16, or int8 with a scale (..., h, w), the largest size of a
    cell's features divided by 127. Raise UserError if a feature is not finite, or too large for float16."""
    one_of("--dtype", dtype, DTYPES)
    features = features.float()
    if dtype == "int8":
        checked = scale = features.abs().amax(-1) / _LARGEST
        numbers = (features / scale.clamp(min=torch.finfo(torch.float32).tiny)[..., None]).round()
        columns = {"features": numbers.clamp(-_LARGEST, _LARGEST).to(torch.int8), "scale": scale}
    else:
        checked = features.half()
        columns = {"features": checked}
    if not checked.isfinite().all():
        raise UserError("a feature is NaN or infinite, or beyond half precision (--dtype int8 has any size)")
    return {name: tensor.cpu().numpy() for name, tensor in columns.items()}


class Basis(NamedTuple):
    """Orthonormal directions (C, D) and the share (D,) of the features' squared sizes that lies in each."""

    directions: Tensor
    kept: Tensor

    def crc32(self) -> int:
        """Return the checksum of both."""
        return zlib.crc32(b"".join(part.numpy().astype("<f4").tobytes() for part in self))


def principal_directions(second_moment: Tensor, channels: int) -> Basis:
    """Return the directions that keep most of the squared sizes of features, whose mean outer product is
    `second_moment` (C, C). A mean is not taken away, so that cosines of the features times these directions are close
    to those of the features. Raise UserError if there are fewer than `channels` channels."""
    in_range("--channels", channels, 1, len(second_moment), whole=True)
    values, vectors = torch.linalg.eigh(second_moment.double().cpu())  # in ascending order
    directions = vectors.flip(1)[:, :channels]
    largest = directions.gather(0, directions.abs().argmax(0, keepdim=True))
    directions = directions * largest.sign()  # an eigenvector's sign is arbitrary, and differs between libraries
    return Basis(directions.float(), (values.flip(0)[:channels] / values.sum()).float())


def read_basis(root: str | Path, info: FeatureInfo) -> Basis:
    """Return the basis of an archive with fewer channels than its teacher has. Raise UserError if it is missing or
    damaged."""
    shapes = (info.teacher_channels or 0, info.channels), (info.channels,)
    paths = [str(Path(root, name)) for name in _BASIS]
    files = (map_file(path, shape, ("<f4",), FEATURES.what) for path, shape in zip(paths, shapes, strict=True))
    basis = Basis(*(torch.from_numpy(np.array(file)) for file in files))
    if info.basis_crc32 not in (None, basis.crc32()):
        raise UserError(f"{FEATURES.what} {printable(paths[0])} is damaged (crc32 is wrong): {REMEDY}")
    return basis


class FeatureWriter(RowWriter[FeatureInfo]):
    """Writes feature maps. The arguments are those of `RowWriter`."""

    kind = FEATURES
    found_out = ("skipped", "basis_crc32")
    other_files = _BASIS

    def write_basis(self, basis: Basis) -> None:
        """Write the basis, before any row."""
        with self.writing():
            for name, part in zip(_BASIS, basis, strict=True):
                np.save(content := io.BytesIO(), part.numpy().astype("<f4"))
                write_whole(self.root / name, content.getvalue())

    def write(self, row: int, features: Tensor) -> None:
        """Write a map (h, w, D). Raise UserError if a feature is not finite, or the disk is full."""
        self.write_row(row, quantised(features, self.info.dtype))

    def finish(self, skipped: Sequence[str] = ()) -> None:
        """Check every row, mark the archive complete and close it. `skipped` names the images without a map. Raise
        UserError if a row is missing or damaged, or writing fails."""
        for _ in self.written_rows():
            pass
        basis = read_basis(self.root, self.info).crc32() if self.info.teacher_channels else None
        self.mark_complete({}, skipped=list(skipped), basis_crc32=basis)
