"""VOLO models and the engine that trains them.

Importing it registers `volo_d1` ... `volo_d5` with timm.
"""

from tlt import answering_help

if not answering_help:
    from volo import models as models
