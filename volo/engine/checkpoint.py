"""The name under which others load weights for fine-tuning."""

from volo.checkpoint.finetune import load_finetune as load_finetune
