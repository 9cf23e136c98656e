"""Everything for training except the model: `loop/` is a run, and below it are the rooms for its
parts. `device.py` and `evaluate.py` also serve programs that do not train."""
