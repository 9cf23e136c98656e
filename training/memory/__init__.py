"""The memory of a training step: what recomputation and offloading keep of it, and a report that
predicts and measures it. The blocks of a model run under the policies of `recompute`."""
