"""Several processes that train one model. `distributed` joins them, `fsdp` shards the model."""
