"""A study as one HTML file with plots, readable offline. Draws and words what others measured and judged."""
