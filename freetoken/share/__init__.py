"""Export, import, push and pull of recipes. Starts nothing."""
