"""Checks with their fixes, gathered from hardware and adapters. Repairs nothing by itself."""
