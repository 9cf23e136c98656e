"""The fastest decode step for a model and its cache."""
from engine.captured import captured_decode
from engine.native.step import native_decode


def fast_decode(model, cache, captured: bool = True, compiled: bool = False):
    """A step (n, 1) ids -> (n, V) logits: a captured (and if asked for compiled) one on CUDA, the
    extension's on a CPU. None if there is neither: use the model's own forward pass."""
    decode = captured_decode(model, cache, compiled) if captured else None
    return decode or native_decode(model, cache)
