#!/usr/bin/env bash
# The native engine on a GPU held down to a small card: kernels, a checkpoint of Qwen3.6's shape, the demo recipe.
# Usage: native.sh OUT_FOLDER   (WHEELS: what the machine's Python lacks; MAKER: make_checkpoint.py; FREE_GIB: 8; PORT: 1919; MODES: eager on)
set -uo pipefail
out=$1 free=${FREE_GIB:-8} port=${PORT:-1919}
began=$(date +%s)
mkdir -p "$out"
[ -d /tmp/ours ] || python3 -m pip install -q --no-deps --no-index --no-compile --target /tmp/ours "${WHEELS:-.whl}"/*.whl
export PYTHONPATH=/tmp/ours:$PWD PYTHONUNBUFFERED=1 FT_STATE=/tmp/ft-native/state FT_RUNTIME_DIR=/tmp/ft-native/run
say() { echo "== $(( $(date +%s) - began )) s: $*"; }
nvidia-smi --query-gpu=name,memory.total,memory.used,driver_version --format=csv,noheader

[ -d /tmp/deep ] || (OMP_NUM_THREADS=1 python3 "${MAKER:-.gpu/make_checkpoint.py}" --preset qwen3.6-35b-a3b --quant nvfp4 --router-skew 1.0 \
  --workers "$(nproc)" --out /tmp/deep > "$out/make.log" 2>&1) &
maker=${!:-}
say "the demo recipe, whole card"
timeout 90 python3 benchmarks/gpu/apply.py --recipe recipes/demo.yaml --free-gib "$free" --set serve.port=$port --steps start,shrink,status,stop \
  --out "$out/demo.jsonl" 2>&1 | cut -c1-1500
tail -c 1500 $FT_STATE/runs/*/engine.log 2>/dev/null | tail -20
wait ${maker:-}
say "checkpoint made, $(du -sh /tmp/deep | cut -f1)"
python3 benchmarks/gpu/hold.py --free-gib "$free" > "$out/hold.log" &
holder=$!
for _ in $(seq 100); do [ -s "$out/hold.log" ] && break; sleep 0.2; done
cat "$out/hold.log"
say "offload at two slot counts"
for mode in ${MODES-eager on}; do
  timeout 150 python3 benchmarks/native_engine.py --model /tmp/deep --device cuda --slots "${SLOTS:-2000,1000}" \
    --prompt-tokens 2000 --decode-tokens 128 --chunk 1024 --decode-graphs "$mode" --quiet \
    > "$out/native_$mode.jsonl" 2> "$out/native_$mode.err"
  echo "$mode: exit code $?"
  cut -c1-2600 "$out/native_$mode.jsonl"; tail -3 "$out/native_$mode.err" | cut -c1-300
done
nvidia-smi --query-gpu=memory.used --format=csv,noheader
say "ft apply of the checkpoint on the native engine"
timeout 120 python3 -m freetoken apply /tmp/deep --set engine.name=native --set workload=chat-2k --set headroom=150MiB \
  --set serve.port=$port --json > "$out/apply.json" 2> "$out/apply.err"
echo "exit code $?"; tail -5 "$out/apply.err" | cut -c1-400
python3 -m freetoken status 2>&1 | tail -25
python3 -m freetoken bench run --workload chat-2k --repeats 1 --limit 60s 2>&1 | tail -25
python3 -m freetoken stop --all
kill $holder
if [ "${TESTS_S:-300}" -gt 0 ]; then
  say "kernels on the device"
  timeout ${TESTS_S:-300} python3 -m pytest -v -p no:cacheprovider -m gpu tests/unit/engine 2>&1 | tee "$out/kernels.log"
fi
say "done"
