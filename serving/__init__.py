"""An HTTP server around the batching engine, with OpenAI's interface."""
