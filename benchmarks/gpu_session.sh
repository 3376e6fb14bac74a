#!/usr/bin/env bash
# What needs a GPU, as three commands of at most eight minutes each, without a network:
#   benchmarks/gpu_session.sh correctness [folder] [--rehearse]   tests, statistics, compute-sanitizer
#   benchmarks/gpu_session.sh kernels [folder] [--rehearse]       times of operators, ncu, peers
#   benchmarks/gpu_session.sh steps [folder] [--rehearse]         times and traces of engine steps
# The folder (default: gpu-results/COMMAND) gets one file, results.tar.gz, with report.html, summary.tsv, machine.json and
# what each part wrote. It is written anew after every part, and at the end whatever happens: interrupt, failure, limit.
# For a bare machine with Python, torch (CUDA), triton and nvcc; tests and steps want pytest, pytest-xdist, hypothesis and
# transformers, the statistics scipy, peers what SPECDEC_PEERS names. `make gpu-cache` packs compiled kernels that a
# session loads (SPECDEC_GPU_CACHE names another file); where they do not fit, a line says so and they are compiled here.
# --rehearse runs the same programs on a simulated GPU at tiny sizes. The exit status counts failed parts; 130 or 143 says
# that the session was interrupted, 129 that its terminal closed, 64 that it was not understood. PYTHON names the
# interpreter, MAX_JOBS the processes of the build, SPECDEC_SESSION_SECONDS the budget of all parts.
set -uo pipefail
refuse() {
  echo "gpu_session: $1" >&2
  exit 64
}
command=${1:-}
case $command in
-h | --help)
  sed -n '/^set /q; s/^# \{0,1\}//p' "$0" | tail -n +2
  exit 0
  ;;
correctness | kernels | steps) shift ;;
*) refuse "got command '$command'; expected correctness, kernels or steps" ;;
esac
out= rehearse=
for word in "$@"; do
  case $word in
  --rehearse) rehearse=1 ;;
  -*) refuse "got option '$word'; expected --rehearse or none" ;;
  /*) out=$word ;;
  *) out=$PWD/$word ;;
  esac
done
cd "$(dirname "$0")/.." || exit 64
out=${out:-$PWD/gpu-results/$command}
mkdir -p "$out" || refuse "cannot make the folder $out"
work=$(mktemp -d)
python=${PYTHON:-python3}
cores=$(nproc)
workers=$((cores < 12 ? cores : 12))
export PYTHONPATH="$PWD:$PWD/kernels:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}" MAX_JOBS=${MAX_JOBS:-$cores}
if [ "$rehearse" ]; then
  export OMP_NUM_THREADS=1 TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$HOME/.triton/cache}"
  run=("$python" -m benchmarks.gpu.rehearsal)
  budget=1800 slack=5 # other programs share the cores of a rehearsal
else
  export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$PWD/build/triton-cache}"
  run=("$python" -m)
  budget=${SPECDEC_SESSION_SECONDS:-470} slack=1 # of all parts, and of the report
fi
grace=2
reserve=14
failed=0
running=
child=
found=

kernels_held() { # how many compiled kernels Triton's cache holds
  find "$TRITON_CACHE_DIR" -name '*.cubin' 2>/dev/null | wc -l
}

part() { # part NAME SECONDS COMMAND...: runs with a limit and within the budget, keeps the output, notes how it went
  local name=$1 limit=$(($2 * slack)) left=$((budget - reserve - SECONDS)) started=$SECONDS status
  shift 2
  limit=$((limit < left ? limit : left))
  if [ "$limit" -lt 1 ]; then
    note "$name" "not run: no time left" 0
    failed=$((failed + 1))
    return
  fi
  echo "== $name (at most $limit s)"
  running=$name
  timeout --kill-after=$grace "$limit" "$@" >"$work/$name.log" 2>&1 & # behind: a signal need not wait for it to end
  child=$!
  wait "$child"
  status=$?
  running= child=
  tail -n 12 "$work/$name.log"
  note "$name" "$([ $status = 0 ] && echo passed || echo "failed ($status)")" $((SECONDS - started))
  [ $status = 0 ] || failed=$((failed + 1))
  pack
  return $status
}

note() { # note PART RESULT SECONDS
  printf '%s\t%s\t%s s\n' "$@" | tee -a "$work/summary.tsv"
}

pack() { # all that there is, in one file that is whole whenever this is ended
  find "$work" -name '*.log' -size +4M -exec truncate -s 4M {} +
  tar -czf "$out/results.tar.gz.new" -C "$work" . && mv "$out/results.tar.gz.new" "$out/results.tar.gz"
}

interrupted() { # interrupted STATUS: ends the part that runs, and the session
  trap '' INT TERM HUP
  if [ -n "$child" ]; then
    kill "$child" 2>/dev/null
    wait "$child"
    note "$running" interrupted 0
  fi
  exit "$1"
}

finish() { # report and results of whatever there is; a failure counts unless the session failed already
  local status=$?
  trap - EXIT
  [ -z "$found" ] || sed -i "s/null/$(($(kernels_held) - found))/" "$work/cache.json"
  timeout --kill-after=$grace 8 "$python" -m benchmarks.gpu.report "$work" || [ $status != 0 ] || status=1
  pack || [ $status != 0 ] || status=1
  rm -rf "$work"
  echo "== $command: $failed parts failed; $SECONDS s; results: $out/results.tar.gz"
  exit "$status"
}

prepare() { # prepare JOBS: the machine, the extensions, compiled kernels; jobs: what is compiled where none fit
  local held
  part machine 40 "${run[@]}" benchmarks.gpu.machine "$work" || exit "$failed"
  if [ -z "$rehearse" ]; then
    part build 95 env SPECDEC_BUILD=auto "$python" setup.py -q build_ext --inplace
    part built 30 "$python" -c "import torch, specdec_kernels as k; import specdec_kernels._C, specdec_kernels._C_cuda; print(k.explain())"
  fi
  held=$(kernels_held)
  part cache 90 "$python" -m benchmarks.gpu.kernel_cache load "${SPECDEC_GPU_CACHE:-build/gpu-cache.tar.xz}" --jobs "$@"
  found=$(kernels_held)
  echo "{\"held_before\": $held, \"added\": $((found - held)), \"compiled_later\": null}" >"$work/cache.json"
}

tests() { # tests NAME SECONDS WORDS...: pytest in parallel, one test at a time from the front; NAME.json keeps outcomes
  local name=$1 limit=$2 spread=(-n "$workers" --dist load --maxschedchunk 1)
  shift 2
  [ -z "$rehearse" ] || spread=(-p benchmarks.gpu.rehearsal)
  part "$name" "$limit" env OUTCOMES="$work/$name.json" "$python" -m pytest -v --tb=short -p benchmarks.gpu.pytest_outcomes "${spread[@]}" "$@"
}

correctness() {
  local few=() draws=(--draws 200000) jobs=draws
  [ -z "$rehearse" ] || few=(-k "kernel_runs and tree_plan or captured and none") draws=(--draws 200 --vocab 300 --rules rejection) jobs=
  prepare $jobs
  tests tests 200 tests/gpu --maxfail=100 "${few[@]}"
  [ "$rehearse" ] || tests operators 30 tests/kernels/test_torch_ops.py tests/kernels/test_dispatch.py
  [ -z "$rehearse" ] || part once 60 "${run[@]}" benchmarks.kernels.once --size small tree_plan
  part memcheck 60 "${run[@]}" benchmarks.kernels.sanitize memcheck --out "$work"
  part racecheck 60 "${run[@]}" benchmarks.kernels.sanitize racecheck --out "$work"
  part lab 60 "${run[@]}" benchmarks.lab.draws_time --out "$work/lab_draws.json" --device cuda --threads 1 "${draws[@]}"
}

kernels() {
  local jobs=operators ours=(--rounds 30) theirs=(--rounds 20)
  [ -z "$rehearse" ] || jobs=tiny ours=(--tiny --rounds 2 tree_attention distribution_stats) theirs=(--tiny --rounds 2 kv_commit)
  prepare $jobs
  part kernels 240 "${run[@]}" benchmarks.kernels.gpu --out "$work" "${ours[@]}"
  [ -z "$rehearse" ] || part once 60 "${run[@]}" benchmarks.kernels.once --size tiny tree_plan
  part ncu 100 "${run[@]}" benchmarks.kernels.ncu --out "$work"
  part peers 240 "${run[@]}" benchmarks.kernels.gpu --peers --out "$work" "${theirs[@]}"
}

steps() {
  local jobs=steps shapes=(8b 1b) rows=(1 8 64) more=(--steps 30)
  [ -z "$rehearse" ] || jobs= shapes=(tiny) rows=(2) more=(--steps 2 --prompt 8)
  prepare $jobs
  for shape in "${shapes[@]}"; do
    part "steps-$shape" 210 "${run[@]}" benchmarks.step --out "$work" --shape "$shape" --drafter eagle3 --rows "${rows[@]}" \
      --drafted 4 0 --acceptance half none all --modes graph "${more[@]}"
  done
  part sync 60 "${run[@]}" benchmarks.step --out "$work" --shape "${shapes[-1]}" --rows 1 --drafted 4 --modes graph sync "${more[@]}"
}

: >"$work/summary.tsv"
trap finish EXIT
trap 'interrupted 130' INT
trap 'interrupted 143' TERM
trap 'interrupted 129' HUP
"$command"
exit "$failed"
