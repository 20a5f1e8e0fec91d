"""VOLO models and the engine that trains them.

Importing it registers `volo_d1` ... `volo_d5` with timm.
"""

from tlt import needs_models

if needs_models:
    from volo import models as models
