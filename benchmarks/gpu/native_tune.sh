#!/usr/bin/env bash
# `ft tune` of the native engine on a GPU held down to a small card, in the foreground. Usage: native_tune.sh OUT_FOLDER
# WHEELS, MAKER, FREE_GIB (8) and PORT (1919) as in native.sh; MINUTES (6), TUNE_SET. About MINUTES and one more.
set -uo pipefail
out=$1 began=$(date +%s)
mkdir -p "$out"
[ -d /tmp/deep ] || (OMP_NUM_THREADS=1 python3 "${MAKER:-.gpu/make_checkpoint.py}" --preset qwen3.6-35b-a3b --quant nvfp4 --router-skew 1.0 \
  --workers "$(nproc)" --out /tmp/deep > "$out/make.log" 2>&1) &
maker=${!:-}
[ -d /tmp/ours ] || python3 -m pip install -q --no-deps --no-index --no-compile --target /tmp/ours "${WHEELS:-.whl}"/*.whl
export PYTHONPATH=/tmp/ours:$PWD PYTHONUNBUFFERED=1 FT_STATE=/tmp/ft-native-tune/state FT_RUNTIME_DIR=/tmp/ft-native-tune/run
wait ${maker:-}
echo "== $(($(date +%s) - began)) s: checkpoint made"
python3 benchmarks/gpu/hold.py --free-gib "${FREE_GIB:-8}" > "$out/hold.log" &
holder=$!
for _ in $(seq 100); do [ -s "$out/hold.log" ] && break; sleep 0.2; done
cat "$out/hold.log"
python3 -m freetoken tune /tmp/deep --set engine.name=native --set headroom=150MiB --set serve.port="${PORT:-1919}" \
  --workload benchmarks/gpu/hand-2k.yaml --objective decode_tps --budget "${MINUTES:-6}m" ${TUNE_SET:-} 2>&1 | tee "$out/tune.log" | cut -c1-400
python3 -m freetoken results 2>&1 | tail -30
python3 -m freetoken report --out "$out/report.html" 2>&1 | tail -3
python3 -m freetoken stop --all
kill $holder
tar -C $FT_STATE -czf "$out/state.tgz" .
echo "== $(($(date +%s) - began)) s: done"
