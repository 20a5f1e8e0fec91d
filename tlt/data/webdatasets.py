"""Tar shards as timm names them (`--dataset wds/NAME`): by `_info.json` in DATA, or by a pattern instead of a split.

    _info.json   {"splits": {"train": {"filenames": [...], "shard_lengths": [...], "num_samples": N, "alt_label": ""}}}
    pattern      --train-split 'imagenet-train-{0000..1023}.tar', also '...tar|1281167' with the number of images

NAME says nothing, as in timm. Shards in DATA/SPLIT need neither: leave --dataset out.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from tlt.data.folder import printable, split_names
from tlt.data.indexed_files import IndexedFiles
from tlt.data.shard_index import index_shards
from tlt.data.shard_scan import LABEL_KEY
from tlt.data.shards import ShardedImages
from tlt.errors import UserError

_INFO = ("_info.json", "info.json")
_INDEX_SUFFIX = "shards.safetensors"
_MOST_SHARDS = 1_000_000
