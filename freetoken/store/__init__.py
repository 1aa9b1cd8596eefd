"""The one room with SQL: results in and out, ordered migrations."""
