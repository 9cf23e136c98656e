"""The memory of other people's models, from their configs, and what engines allocate for it."""
