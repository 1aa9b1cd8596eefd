"""Which experts are resident: one LRU over all layers, torch-free; a key is `(layer, expert)`.

Knows keys, slots and counts. Does not know tensors, bytes, devices or copies: the engine moves the data that
`SlotTable` decides on, and `replay` runs a recorded trace through the very same class.
"""

from freetoken.residency.replay import HitCurve, compute_hit_curve, replay
from freetoken.residency.slots import Batch, ExpertKey, HitCounters, Move, SlotTable
from freetoken.residency.trace import Trace, TraceHeader, TraceWriter, read_trace

__all__ = [
    "Batch",
    "ExpertKey",
    "HitCounters",
    "HitCurve",
    "Move",
    "SlotTable",
    "Trace",
    "TraceHeader",
    "TraceWriter",
    "compute_hit_curve",
    "read_trace",
    "replay",
]
