"""What every room uses: settings, the model's config, errors, files and sizes. No torch here."""
