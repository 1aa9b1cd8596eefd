"""The native MoE engine on transformers' models: token ids in, token ids out."""
