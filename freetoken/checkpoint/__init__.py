"""What a model is, from its `config.json` and its tensor headers alone. Never loads weights."""
