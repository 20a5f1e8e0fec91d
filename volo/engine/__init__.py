"""Kept for callers of `volo.engine.checkpoint.load_finetune`; everything else has moved (docs/moved.md)."""
