"""`ft tune` over two objectives prints its front; `ft report` tells of the study, and its commands can be typed.

Planner, session, study and storage are real; what a trial measures is arithmetic (`ft_tune_fake`).
"""

import html
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lab")
    shutil.copy(REPO / "recipes" / "demo.yaml", folder / "mine.yaml")
    (folder / "mine.yaml").write_text((folder / "mine.yaml").read_text().replace("name: demo", "name: mine"))
    return folder


def ft(lab, *arguments):
    env = {**os.environ, "FT_STATE": str(lab / "state"), "FT_RUNTIME_DIR": str(lab / "run"), "PYTHONPATH": str(REPO)}
    command = [sys.executable, "-m", "tests.fakes.ft_tune_fake", *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, cwd=lab)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def tuned(lab):
    """What a run over two objectives says to people."""
    objectives = ("--objective", "ttft", "--objective", "decode_tps")
    return ft(lab, "tune", "mine.yaml", "--workload", "code-4k", "--trials", "10", *objectives)


def read_front(text):
    lines = text.splitlines()
    begin = lines.index("front of ttft and decode_tps: nothing that was tried is better in both")
    headings = re.split(r"  +", lines[begin + 1].strip())
    rows = []
    for line in lines[begin + 2 :]:
        if line.startswith(("  written", "  kept")):
            break
        rows.append(dict(zip(headings, line.split(), strict=True)))
    return rows


def test_a_run_over_two_objectives_prints_its_front(tuned):
    rows = read_front(tuned)
    assert len(rows) >= 2
    times = [float(one["ttft s"]) for one in rows]
    rates = [float(one["decode_tps tok/s"]) for one in rows]
    # Ordered by the first objective, and whoever is worse in it is better in the other.
    assert times == sorted(times)
    assert rates == sorted(rates)
    assert len({(one["prefill_chunk_tokens"], one.get("cpu_threads")) for one in rows}) == len(rows)
    # Larger chunks have the shorter time to the first token here, smaller ones the faster decoding.
    chunks = [int(one["prefill_chunk_tokens"]) for one in rows]
    assert chunks == sorted(chunks, reverse=True)


def test_the_report_of_two_objectives_has_the_same_front_and_a_history_of_each(lab, tuned):
    report = json.loads(ft(lab, "report", "mine", "-o", "two.html", "--json"))
    assert {"front", "history_ttft", "history_decode_tps", "slots", "memory"} <= set(report["drawn"])
    page = (lab / "two.html").read_text(encoding="utf-8")
    table = page[page.index('id="front-table"') : page.index("</table>", page.index('id="front-table"'))]
    figures = re.findall(r'<td class="n">([\d.,]+)</td><td class="n">([\d.,]+)</td><td class="n">', table)
    cells = [tuple(cell for cell in re.findall(r'<td class="n">([^<]*)</td>', row)) for row in table.split("<tr>")[2:]]
    assert [(one["ttft s"], one["decode_tps tok/s"]) for one in read_front(tuned)] == [cell[1:3] for cell in cells]
    assert figures


def test_the_page_names_nothing_of_this_machine_s_owner(lab, tuned):
    ft(lab, "report", "mine", "-o", "private.html")
    page = (lab / "private.html").read_text(encoding="utf-8")
    assert str(lab) not in page
    assert os.uname().nodename not in re.sub(r"<script>.*?</script>", "", page, flags=re.S)


def test_the_commands_of_the_page_lead_to_the_best_setting_and_to_the_study(lab, tuned):
    ft(lab, "report", "mine", "-o", "commands.html")
    page = (lab / "commands.html").read_text(encoding="utf-8")
    run, search = (shlex.split(html.unescape(one)) for one in re.findall(r"<pre>(.*?)</pre>", page, flags=re.S))
    assert run[:3] == ["ft", "apply", "mine.yaml"]
    plan = json.loads(ft(lab, "plan", *run[2:], "--json"))
    chunk = read_front(tuned)[0]["prefill_chunk_tokens"]
    assert str(plan["settings"]["prefill_chunk_tokens"]) == chunk
    assert plan["provenance"]["settings.prefill_chunk_tokens"] == "command line"
    assert search[:2] == ["ft", "tune"]
    preview = json.loads(ft(lab, *search[1:], "--dry-run", "--json"))
    assert preview["study"] in page
