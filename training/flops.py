"""FLOPs of a training step, nanoGPT's way."""

A100_BF16_FLOPS = 312e12


def estimate_mfu(model, fwdbwd_per_iter: int, dt: float) -> float:
    """Model FLOPs utilisation as nanoGPT counts it: 6N + 12*L*H*D*T per token (PaLM, appendix B) over an A100's peak.

    Counts every layer as full attention over block_size, so it flatters windows: it is for comparison with nanoGPT.
    """
    c, plan = model.config, model.plan
    flops_per_token = 6 * model.get_num_params() + 12 * c.n_layer * c.n_head * plan.head_dim * c.block_size
    return flops_per_token * c.block_size * fwdbwd_per_iter / dt / A100_BF16_FLOPS
