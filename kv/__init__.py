"""The KV cache: plan, slots, cache, int8 storage, report."""
