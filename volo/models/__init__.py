"""VOLO. Importing it registers `volo_d1` ... `volo_d5`, `volo_d0` and `volo_test` with timm."""

from volo.models.volo import ENTRYPOINTS, VOLO

globals().update(ENTRYPOINTS)  # volo.models.volo_d1(...), the published names

__all__ = ["VOLO", *ENTRYPOINTS]
