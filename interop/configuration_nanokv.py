"""The name under which modeling_nanokv.py finds the configuration, here and in exported folders."""
from interop.nanokv_vllm.config import NanoKVConfig  # noqa: F401
