"""Pages of global slots: their table, the paged cache, and attention over pages."""
