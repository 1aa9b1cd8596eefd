"""Device kernels of the native engine."""
