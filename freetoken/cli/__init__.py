"""A file for each command: parse, call one function, print."""
