"""The memory of other people's models: read from their configs, and what engines allocate for it."""
