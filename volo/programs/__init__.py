"""The command-line programs. `train.py`, `validate.py` and `generate_label.py` at the root start them."""
