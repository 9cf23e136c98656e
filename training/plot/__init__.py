"""Pictures: `python -m training.plot` draws the losses of runs. `figures` is shared by all plots of
the project."""
