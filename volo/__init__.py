"""VOLO models and the programs that train them.

Importing this package registers the models with timm (docs/models.md).
"""

from tlt import __version__ as __version__
from tlt import starts_program

if not starts_program:
    from volo import models as models
