#!/usr/bin/env bash
# `ft` driving the upstream engine (freetoken 0.2.1) on a GPU held down to small cards. Usage: upstream.sh OUT_FOLDER STEPS...
# STEPS: eight (8 GiB: start, again, grow, bench, strategy, stop), six (6 GiB: start, bench, stop), oom (memory that goes
# away after the plan), tune (a detached `ft tune`; MINUTES, TUNE_SET and STARTS of the search: the confirmation has up to
# four more), wait (follow a study until it ends or WAIT_S), release (give back the memory that `tune` holds).
# WHEELS: what the machine's Python lacks for ft; ENGINE: wheels of the engine; MAKER: make_checkpoint.py.
set -uo pipefail
out=$1; shift
began=$(date +%s)
mkdir -p "$out"
pip="python3 -m pip install -q --no-deps --no-index --no-compile --target"
[ -d /tmp/ours ] || $pip /tmp/ours "${WHEELS:-.whl}"/*.whl
[ -d /tmp/site ] || $pip /tmp/site "${ENGINE:-.eng}"/*.whl
export PYTHONPATH=/tmp/ours:$PWD PYTHONUNBUFFERED=1 OMP_NUM_THREADS=4 TMPDIR=/tmp
export FT_STATE=${FT_STATE:-/tmp/ft-up/state} FT_RUNTIME_DIR=${FT_RUNTIME_DIR:-/tmp/ft-up/run}
ft="python3 -m freetoken"
say() { echo "== $(( $(date +%s) - began )) s: $*"; }
mkdir -p $FT_STATE
cat > $FT_STATE/local.yaml <<Y
engines: {freetoken: {python: $(command -v python3), pythonpath: /tmp/site}}
Y
[ -d /tmp/deep ] || OMP_NUM_THREADS=1 python3 "${MAKER:-.gpu/make_checkpoint.py}" --preset qwen3.6-35b-a3b --quant nvfp4 \
  --router-skew 1.0 --workers "$(nproc)" --out /tmp/deep > "$out/make.log" 2>&1
say "prepared"
$ft probe 2>&1 | head -30
# Headroom by the card that is emulated: `server` is a share of the GPU that is really there.
apply() { timeout 420 python3 benchmarks/gpu/apply.py --model /tmp/deep --set headroom="${HEADROOM:-150MiB}" --set serve.port="${PORT:-1919}" ${FT:+--ft "$FT"} --out "$out/apply.jsonl" "$@" 2>&1 | cut -c1-2200; }
logs() { for one in $(ls -dt $FT_STATE/runs/*/ | head -${1:-1}); do echo "-- $one"; tail -12 "$one/engine.log" | cut -c1-220; done; }
hold() { python3 benchmarks/gpu/hold.py --free-gib "$1" > "$out/hold.log" & holder=$!; sleep 6; cat "$out/hold.log"; }
for step in "$@"; do
  say "$step"
  case $step in
    eight) apply --recipe recipes/qwen3.6-35b-a3b-8gb.yaml --free-gib 8 --steps ${EIGHT:-start,again,shrink,grow,status,speed,strategy,stop} \
             --bench "--workload agent-8k --repeats 1 --limit 60s"; logs 2 ;;
    six) apply --recipe recipes/qwen3.6-35b-a3b-6gb.yaml --free-gib 6 --steps start,status,speed,stop \
           --bench "--workload agent-8k --repeats 1 --limit 60s"; logs ;;
    oom) apply --recipe recipes/qwen3.6-35b-a3b-8gb.yaml --free-gib 8 --less-mib "${LESS_MIB:-900}" --steps oom,status,stop; logs 3 ;;
    tune) setsid python3 benchmarks/gpu/hold.py --free-gib "${FREE_GIB:-8}" --for-s 3000 > "$out/hold.log" 2>&1 &
      echo $! > "$out/hold.pid"; sleep 6; cat "$out/hold.log"
      $ft tune recipes/qwen3.6-35b-a3b-${FREE_GIB:-8}gb.yaml --set model.path=/tmp/deep --set headroom="${HEADROOM:-150MiB}" \
        --workload "${WORKLOAD:-agent-8k}" \
        --budget "${MINUTES:-20}m" --starts "${STARTS:-4}" --detach ${TUNE_SET:-} 2>&1 | tail -20 ;;
    wait) ends=$(( $(date +%s) + ${WAIT_S:-480} ))
      while [ "$(date +%s)" -lt $ends ] && $ft tune --status 2>&1 | tee "$out/status.txt" | grep -q running; do sleep 10; done
      cat "$out/status.txt"; $ft results 2>&1 | tail -30; cp -r $FT_STATE/*.db "$out/" ;;
    release) kill "$(cat "$out/hold.pid")"; sleep 2 ;;
    *) echo "unknown step: $step" ;;
  esac
done
tar -C $FT_STATE -czf "$out/runs.tar.gz" --exclude=engine.log.1 runs
say "done"
