"""OpenAI-compatible HTTP and the control API in front of the native engine. No tensor code."""
