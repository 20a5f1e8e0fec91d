"""VOLO. Importing this registers the variants with timm."""

from volo.models.volo import ENTRYPOINTS, VOLO

globals().update(ENTRYPOINTS)  # volo.models.volo_d1(...), the published names

__all__ = ["VOLO", *ENTRYPOINTS]
