"""Other people's formats and engines: weights of GPT-2 from Hugging Face come in here. Knows nothing of training."""
