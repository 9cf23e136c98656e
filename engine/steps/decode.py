"""The fastest decode step for a model and its cache."""
from engine.steps.captured import captured_decode
from engine.steps.native import native_decode


def fast_decode(model, cache, captured: bool = True, compiled: bool = False):
    """Return a step (n, 1) ids -> (n, V) logits: captured (and optionally compiled) on CUDA, the
    extension's on a CPU. None if neither works: then use the model's own forward pass."""
    decode = captured_decode(model, cache, compiled) if captured else None
    return decode or native_decode(model, cache)
