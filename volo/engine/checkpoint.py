"""The old name of `volo.checkpoint.finetune.load_finetune`, which other projects import."""

from volo.checkpoint.finetune import load_finetune as load_finetune
