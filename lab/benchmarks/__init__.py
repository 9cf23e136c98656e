"""What bench.py measures: a module for each mode, with `run(settings, data_root) -> figures`, and what they share."""
