"""Figures as HTML with plots. Measures nothing."""
