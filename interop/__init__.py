"""Import and export of Hugging Face folders, and conversion to a smaller KV cache."""
