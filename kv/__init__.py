"""What is remembered: the plan (which layer uses which cache), the caches, int8 storage, the report."""
