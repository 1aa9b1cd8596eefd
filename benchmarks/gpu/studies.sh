#!/usr/bin/env bash
# Studies of `ft tune` on the upstream engine, one after another on each GPU of a machine. Calls may be cut: the studies are
# detached, and `next` follows them. Usage: studies.sh OUT_FOLDER first|next WAIT_S
# Needs WHEELS, ENGINE and MAKER as upstream.sh does; SHARED: a file that names the wheels of ENGINE that lie in WHEELS.
# About 15 minutes on two GPUs. What each study writes comes back as NAME.tgz in OUT_FOLDER: its state folder and logs.
set -uo pipefail
out=$1 mode=$2 wait_s=$3 began=$(date +%s) work=/tmp/ft-studies
mkdir -p "$out" $work
if [ "$mode" = first ]; then
  pip="python3 -m pip install -q --no-deps --no-index --no-compile --no-cache-dir --target"
  wheels=${WHEELS:-.whl} engine=${ENGINE:-.eng}
  ($pip /tmp/ours "$wheels"/*.whl
   { ls "$engine"/*.whl; [ -z "${SHARED:-}" ] || sed "s#^#$wheels/#" "$SHARED"; } | xargs $pip /tmp/site) > $work/pip.log 2>&1 &
  [ -d /tmp/deep ] || { OMP_NUM_THREADS=1 python3 "${MAKER:-.gpu/make_checkpoint.py}" --preset qwen3.6-35b-a3b --quant nvfp4 \
    --router-skew 1.0 --workers "$(nproc)" --out /tmp/deep.part > $work/make.log 2>&1 && mv /tmp/deep.part /tmp/deep; }
  wait
  rm -rf $work/repo; cp -r . $work/repo
  nvidia-smi --query-gpu=uuid --format=csv,noheader > $work/uuids
  cat > $work/chain.sh <<'X'
# chain.sh ROW_OF_GPU NAME... : studies NAME=FREE_GIB|WORKLOAD|STARTS|OPTIONS, in order
cd /tmp/ft-studies/repo
export CUDA_VISIBLE_DEVICES=$(sed -n "$1p" /tmp/ft-studies/uuids) PORT=$((1900 + 20 * $1)) PYTHONUNBUFFERED=1; shift
for one in "$@"; do
  name=${one%%=*}; IFS='|' read -r free workload starts options <<< "${one#*=}"
  echo "=== $name at $(date +%T)"
  FT_STATE=/tmp/ft-studies/$name/state FT_RUNTIME_DIR=/tmp/ft-studies/$name/run FREE_GIB=$free WORKLOAD=$workload STARTS=$starts \
    MINUTES=20 WAIT_S=1260 TUNE_SET=$options bash benchmarks/gpu/upstream.sh /tmp/ft-studies/$name/out tune wait release
done
echo chain done
X
  hand=benchmarks/gpu/hand-2k.yaml
  setsid bash $work/chain.sh 1 "state=8|$hand|3|--objective decode_tps --set allow_quality_changes=[state_dtype]" \
    "six=6|$hand|2|--objective decode_tps" > $work/gpu1.log 2>&1 < /dev/null &
  setsid bash $work/chain.sh 2 "turn=8|agent-8k|2|--objective turn_time --repeats 1" \
    "decode=8|agent-8k|2|--objective decode_tps --repeats 1" > $work/gpu2.log 2>&1 < /dev/null &
  sleep 1
fi
while [ $(($(date +%s) - began)) -lt "$wait_s" ] && [ "$(cat $work/gpu?.log | grep -c 'chain done')" -lt 2 ]; do sleep 2; done
for name in state six turn decode; do [ -d $work/$name ] && tar -C $work -czf "$out/$name.tgz" --exclude=runs.tar.gz $name; done
tail -c 3000 $work/gpu1.log; echo; echo -----; tail -c 3000 $work/gpu2.log
