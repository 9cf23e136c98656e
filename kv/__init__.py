"""The KV cache: plan, slots, cache, int8 storage, report."""


def account(config: dict, **options) -> dict:
    """The memory of any model, from the contents of its config.json: see `kv.models.account`."""
    from kv.models.account import account
    return account(config, **options)
