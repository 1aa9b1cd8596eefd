"""The one room with SQL: results, runs and measured bytes in and out of `ft.db`."""

from freetoken.store.results import Store, open_store, read_calibration, read_store

__all__ = ["Store", "open_store", "read_calibration", "read_store"]
