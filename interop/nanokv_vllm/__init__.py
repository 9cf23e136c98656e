"""A vLLM plugin for `vllm serve FOLDER`, where FOLDER was written by nanoKV's `interop.export`."""

def register() -> None:
    """vLLM's entry point (vllm.general_plugins), called at least once in each process."""
    from transformers import AutoConfig
    from vllm import ModelRegistry

    from .config import NanoKVConfig
    AutoConfig.register('nanokv', NanoKVConfig, exist_ok=True)  # no --trust-remote-code needed
    if 'NanoKVForCausalLM' not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model('NanoKVForCausalLM', f'{__name__}.model:NanoKVForCausalLM')
