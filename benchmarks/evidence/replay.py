"""Print the replay of public reports as a table: what was reported, what the planner says, each miss with its reason.

    python benchmarks/evidence/replay.py > benchmarks/evidence.md

Rows and rules are those of tests/contract/test_evidence.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.fakes.evidence import DOCUMENT, ROWS, free_spread, judge


def main() -> None:
    rows, misses, comfortable = [], [], []
    for row in ROWS:
        verdict = judge(row)
        ran = row["outcome"] == "ok"
        left = "" if verdict.left_ratio is None else f"{100 * verdict.left_ratio:.1f}"
        mark = "" if verdict.fits is ran else "miss"
        said = "fits" if verdict.fits else "does not fit"
        rows.append(f"| {row['id']} | {row['gpu']} | {row['card']} | {row['outcome']} | {said} | {left} | {mark} |")
        if mark:
            why = DOCUMENT["known_misses"].get(row["id"], "no reason known")
            told = f"reported `{row['outcome']}`, planner: {said}"
            misses.append(f"- **{row['id']}**, {told}. {verdict.reason}. Reason: {why}.")
        if not ran:
            shifted = [judge(row, shift) for shift in (-free_spread(row), 0, free_spread(row))]
            comfortable += [row["id"] for one in shifted if one.fits and (one.left_ratio or 0) > 0.05]
    died = sum(row["outcome"] != "ok" for row in ROWS)
    print("# Public reports replayed\n")
    print("    python benchmarks/evidence/replay.py > benchmarks/evidence.md\n")
    print(
        f"{len(ROWS)} reports of engines `freetoken` and `llamacpp` can be judged ({died} died of memory, "
        f"{len(ROWS) - died} ran); {len(DOCUMENT['not_judged'])} more of these engines cannot, each with its reason "
        f"below. **{len(ROWS) - len(misses)} of {len(ROWS)} verdicts are right "
        f"({100 * (1 - len(misses) / len(ROWS)):.1f} %)**, and {len(set(comfortable))} of those that died are called "
        "comfortable (more than 5 % of the card left at the peak, for any free VRAM within its uncertainty).\n"
    )
    print(
        "Rules, the same for every row: what the report gives is taken, a flag that it does not give has the engine's "
        "default, free VRAM is as reported or what is usual for the card, the longest prompt is a full chunk, headroom "
        "is 0. No rule is fitted to a row. Two things are not independent of these reports and said so: the dense "
        "formats of `ornith-1.5-35b-nvfp4` follow from three of them (r093, r105, r106), and the published activation "
        "figures of two families (Ornith, Nemotron) come from threads that some reports belong to.\n"
    )
    print("## Misses\n")
    print("\n".join(misses), "\n")
    print("## All\n")
    print("| report | GPU | card | reported | planner | % of the card left | |")
    print("| --- | --- | --- | --- | --- | ---: | --- |")
    print("\n".join(rows))
    print("\n## Not judged\n")
    print("\n".join(f"- {name}: {why}" for name, why in sorted(DOCUMENT["not_judged"].items())))


if __name__ == "__main__":
    main()
