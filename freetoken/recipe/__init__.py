"""YAML -> frozen, typed recipes and workloads. No facts of a machine, no flag names of an engine."""
