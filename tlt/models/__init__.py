"""LV-ViT, and the code that all models trained with token labels share. Importing it registers the models with timm."""

from tlt.models import lvvit as lvvit
from tlt.models import transformers_vit as transformers_vit
from tlt.models.fit_weights import adapt_state_dict
from tlt.models.layers import resize_pos_embed
from tlt.models.lvvit import ENTRYPOINTS, LVViT
from tlt.models.token_labeling import TokenLabelModel

globals().update(ENTRYPOINTS)  # the published names, such as tlt.models.lvvit_s(...); `lvvit` stays the module

__all__ = ["LVViT", "TokenLabelModel", "adapt_state_dict", "lvvit", "resize_pos_embed", *ENTRYPOINTS]
