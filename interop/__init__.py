"""Other people's formats: Hugging Face folders, in and out; conversion to a smaller memory."""
