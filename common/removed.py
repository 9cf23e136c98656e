"""Settings that earlier versions had: an old flag, config file or checkpoint gets an answer."""

COMMIT = '461914ad'  # the last one that has them
KEYS = (  # names of settings (not vocab_size, which was never one of training)
    'act_clamp also_as attention_z_loss away bandwidth converted_from flops '
    'hit_rate int8_forward int8_training keep_checkpoints kv_stride memory memory_budget '
    'message_tokens new_tokens offload_optimizer page_sizes prefix_disk_budget prefix_folder '
    'price recall requests_per_second shape speed tpot tune utilization').split()
VALUES = {  # name of a setting that stays -> values that it no longer takes
    'against': ('hf', 'llama.cpp'),
    'mode': ('chat', 'lengths'),
    'optimizer': ('adamw8bit',),
    'recompute': ('auto',),
}


def removed(name: str, value=None) -> str:
    """Return '' or the sentence that says which commit still has a setting, or a value of it."""
    if name == 'checkpoint_blocks':
        return "checkpoint_blocks was removed: recompute='block' does the same"
    if name in KEYS:
        return f'{name} was removed; commit {COMMIT} has it'
    if value in VALUES.get(name, ()):
        return f'{name}={value!r} was removed; commit {COMMIT} has it'
    return ''
