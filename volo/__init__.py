"""VOLO models and the programs that train them.

Importing it registers `volo_d1` ... `volo_d5` with timm.
"""

from tlt import __version__ as __version__
from tlt import starts_program

if not starts_program:
    from volo import models as models
