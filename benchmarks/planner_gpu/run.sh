#!/usr/bin/env bash
# On the GPU machine: unpack the upstream engine, make the checkpoints, measure. Usage: run.sh GPUS JOBS OUT_FOLDER
# WHEELS, MAKER: the engine's wheels and make_checkpoint.py. SHALLOW_ONLY=1 leaves the 40-layer checkpoint out.
set -euo pipefail
gpus=$1 jobs=$2 out=$3
began=$(date +%s)
cores=$(nproc)
# Torch would give every engine a thread for each core, and their banks would take minutes.
threads=${THREADS:-$(( cores / (2 * gpus) > 4 ? 4 : (cores / (2 * gpus) > 0 ? cores / (2 * gpus) : 1) ))}
export OMP_NUM_THREADS=$threads
mkdir -p "$out"
[ -d /tmp/site ] || python3 -m pip install -q --no-deps --no-index --target /tmp/site "${WHEELS:-.eng}"/*.whl 2>&1 | tail -2
make="python3 ${MAKER:-.gpu/make_checkpoint.py} --preset qwen3.6-35b-a3b --quant nvfp4 --router-skew 1.0 --workers $(( cores > 48 ? 48 : cores ))"
[ -d /tmp/shallow ] || OMP_NUM_THREADS=1 $make --layers 12 --out /tmp/shallow > /dev/null
[ -n "${SHALLOW_ONLY:-}" ] || [ -d /tmp/deep ] || OMP_NUM_THREADS=1 $make --out /tmp/deep > /dev/null
echo "prepared in $(( $(date +%s) - began )) s, $threads threads an engine"
nvidia-smi --query-gpu=name,memory.total,memory.used,pcie.link.gen.current --format=csv,noheader
python3 benchmarks/planner_gpu/measure.py --jobs "$jobs" --site /tmp/site --out "$out/results.jsonl" --logs /tmp/logs \
  --gpus "$gpus" --first-gpu "${FIRST_GPU:-0}" --threads "$threads" ${CLAIMS:+--claims "$CLAIMS"} --stop-after-s "${STOP_AFTER_S:-430}"
tar -C /tmp -czf "$out/logs.tar.gz" logs
echo "all in $(( $(date +%s) - began )) s"
