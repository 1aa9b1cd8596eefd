"""Which experts are resident: one LRU over all layers, torch-free; a key is `(layer, expert)`."""
