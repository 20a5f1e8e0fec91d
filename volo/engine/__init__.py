"""Kept for callers of `volo.engine.checkpoint.load_finetune`. Everything else has moved (docs/moved.md)."""
