import pytest

from freetoken.cli import render
from freetoken.cli.output import PlainConsole
from freetoken.planner.memory import Admission, Finding, Ledger, Line, ResolvedSettings
from freetoken.planner.plan import Plan, Prediction, Refusal, Repair

GIB = 1 << 30


def make_vram(available=6 * GIB):
    lines = (
        Line(key="cuda_context", label="CUDA context", bytes=300 << 20, formula="250 MiB + 50 MiB", source="guess"),
        Line(key="kv_cache", label="KV cache", bytes=160 << 20, formula="8,192 tokens x 20,480 B"),
        Line(key="expert_slots", label="expert slots", bytes=4 * GIB, formula="2,400 slots", source="header"),
        Line(key="prefill_transient", label="prefill activations", bytes=GIB, phases=("prefill",)),
    )  # fmt: skip
    return Ledger(kind="vram", total_bytes=6 * GIB, available_bytes=available, headroom_bytes=256 << 20, lines=lines)


RAM = Ledger(kind="ram", total_bytes=32 * GIB, available_bytes=24 * GIB,
             lines=(Line(key="runtime", label="runtime", bytes=3 * GIB, source="guess"),))  # fmt: skip
DISK = Ledger(kind="disk", total_bytes=100 * GIB, available_bytes=50 * GIB,
              lines=(Line(key="download", label="download", bytes=22 * GIB, source="card"),))  # fmt: skip
SETTINGS = ResolvedSettings(gpu="0", kv_tokens=8192, expert_slots=2400, embed_on_host=True, memory_ratio=0.92)
PREDICTION = Prediction(
    decode_tps=30.84, decode_tps_low=20.1, decode_tps_high=1234, prefill_tps=1123, ttft_s=2.514, hit_ratio=0.581,
    miss_bytes_per_token=239_000_000, limited_by="pcie", notes=("a prior",),
)  # fmt: skip
PLAN = Plan(
    recipe_name="demo", engine="freetoken", engine_version="0.2.1", model_name="demo-moe", settings=SETTINGS,
    provenance={"settings.kv_tokens": "recipe demo.yaml:3"}, vram=make_vram(), ram=RAM, disk=DISK,
    prediction=PREDICTION,
    findings=(Finding(check="x", message="loads serially", is_fatal=False, hint="more RAM"),),
    admission=Admission(is_admitted=True), hardware_name="laptop", track_record="3 launches, 2 % off",
)  # fmt: skip
REFUSAL = Refusal(
    recipe_name="demo", engine="freetoken", model_name="demo-moe",
    message="`demo-moe` needs 5.45 GiB, 4 GiB may be used",
    findings=(Finding(check="a", message="the card is too old", hint="another engine"),
              Finding(check="b", message="loads serially", is_fatal=False)),
    missing_bytes=1840 << 20, ledger="vram", blamed_line="expert_slots", settings=SETTINGS,
    vram=make_vram(4 * GIB), ram=RAM, disk=DISK, alternatives=("a card with 2 GiB more",),
    repairs=(Repair(description="fewer slots", sets={"settings.expert_slots": "1200"}, predicted_decode_tps=24.56),
             Repair(description="close the browser")),
)  # fmt: skip


def test_a_ledger_shows_every_line_the_peak_and_what_is_left(capsys):
    render.render_ledger(make_vram(), PlainConsole(), blamed="kv_cache")
    assert (
        capsys.readouterr().out
        == """\
VRAM
line                           bytes   GiB  phases   formula                  source
CUDA context             314,572,800  0.29  all      250 MiB + 50 MiB         guess
KV cache  <- to blame    167,772,160  0.16  all      8,192 tokens x 20,480 B  formula
expert slots           4,294,967,296  4.00  all      2,400 slots              header
prefill activations    1,073,741,824  1.00  prefill                           formula
peak (prefill)         5,851,054,080  5.45
  6.00 GiB of 6.00 GiB free, 256 MiB kept as headroom: 308 MiB left
  by phase, GiB: load 4.45, capture 4.45, prefill 5.45 (peak), decode 4.45
"""
    )


def test_what_is_missing_is_told_in_bytes():
    text = render.describe_balance(make_vram(available=4 * GIB))
    assert text == "4.00 GiB of 6.00 GiB free, 256 MiB kept as headroom: 1.70 GiB (1,824,522,240 bytes) missing"


def test_a_plan_is_told_whole(capsys):
    render.render_plan(PLAN, PlainConsole())
    told = capsys.readouterr().out
    assert told.startswith("demo: demo-moe with freetoken 0.2.1 on laptop: fits\n\nVRAM\n")
    assert "\nRAM\n" in told
    assert "\ndisk\n" in told
    settings_and_speed = told[told.index("settings\nsetting") :]
    assert (
        settings_and_speed
        == """\
settings
setting                 value  from
gpu                         0
device                   cuda
memory_ratio             0.92
expert_slots            2,400
kv_tokens               8,192  recipe demo.yaml:3
max_running_requests        1
strategy              offload
prefill_chunk_tokens    2,048
embed_on_host             yes
kv_dtype                model
state_dtype             model
text_only                 yes

speed
predicted     figure  unit
decode          30.8  tok/s     20.1 to 1,230; limited by the PCIe link
prefill        1,120  tok/s     limited by arithmetic
TTFT            2.51  s         longest prompt of the workload
hit rate       0.581  0 to 1    experts found resident
miss traffic     239  MB/token
  a prior
3 launches, 2 % off
warning: loads serially
         more RAM
"""
    )


def test_a_forced_plan_says_so_first(capsys):
    render.render_plan(PLAN.model_copy(update={"is_forced": True, "vram": None}), PlainConsole())
    first = capsys.readouterr().out.splitlines()[0]
    assert first == "demo: demo-moe with freetoken 0.2.1 on laptop: does not fit (forced: the planner said no)"


def test_a_refusal_is_an_error_with_its_findings_its_line_and_its_repairs():
    error = render.make_refusal_error(REFUSAL)
    assert (error.exit_code, error.message) == (3, "`demo-moe` needs 5.45 GiB, 4 GiB may be used")
    assert error.details == (
        "the card is too old",
        "warning: loads serially",
        "to blame is the line `expert slots`: 4.00 GiB of VRAM, 2,400 slots",
        "instead: a card with 2 GiB more",
    )
    assert error.hint == "`--set settings.expert_slots=1200` (fewer slots, 24.6 tok/s), or close the browser"


def test_without_repairs_the_hints_of_the_findings_stand():
    assert render.describe_repairs(REFUSAL.model_copy(update={"repairs": ()})) == "another engine"
    assert render.describe_repairs(REFUSAL.model_copy(update={"repairs": (), "findings": ()})) is None


@pytest.mark.parametrize("refusal", [REFUSAL, REFUSAL.model_copy(update={"vram": None, "ram": None, "disk": None})])
def test_a_refusal_shows_the_arithmetic_it_has(capsys, refusal):
    render.render_refusal(refusal, PlainConsole())
    told = capsys.readouterr().out
    assert ("does not fit; the least that was tried:" in told) == (refusal.ram is not None)
    assert ("expert slots  <- to blame" in told) == (refusal.vram is not None)
