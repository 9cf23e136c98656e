"""A plugin for vLLM: `vllm serve FOLDER`, where FOLDER is what `python -m interop.export` of nanoKV wrote."""


def register() -> None:
    """Called by vLLM in each of its processes (entry point vllm.general_plugins); more than once is as good as once."""
    from transformers import AutoConfig
    from vllm import ModelRegistry

    from .config import NanoKVConfig
    AutoConfig.register('nanokv', NanoKVConfig, exist_ok=True)  # so that --trust-remote-code is not needed
    if 'NanoKVForCausalLM' not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model('NanoKVForCausalLM', f'{__name__}.model:NanoKVForCausalLM')
