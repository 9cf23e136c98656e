"""Checkpoint files: nanoGPT's keys, written atomically, read without running any code. The manager
decides which files of a run are kept, and the models in them can be adapted to other settings."""
