"""One training for several KV plans: every step trains the same weights under each plan, so that
the model runs at any of these memories."""
