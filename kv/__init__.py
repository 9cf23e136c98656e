"""What is remembered: the plan, the slots, the cache, int8 storage, the report."""
