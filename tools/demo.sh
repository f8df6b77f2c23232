#!/usr/bin/env bash
# The demo: makes the shapes data set, trains a LaplacianFormer Mask R-CNN, evaluates and draws.
# Run again, it skips what is finished; an interrupted training goes on from its last epoch.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# OpenMP's threads wait for each other at every operation. By default they spin for so long that
# another program on the same cores makes a step about ten times slower.
export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-3000}"

readonly python=.venv/bin/python
readonly config=configs/demo/mask_rcnn_laplacian_shapes.py
readonly data=data/shapes
readonly work_dir=work_dirs/demo
readonly evaluation=$work_dir/evaluation
readonly pictures=$work_dir/pictures
readonly num_pictures=8

say() { printf '==> %s\n' "$*"; }
# Of the files that find selects.
newest() { find "$@" -printf '%T@ %p\n' | sort -n | tail -n 1 | cut -d ' ' -f 2-; }
last_checkpoint() { printf '%s/%s\n' "$work_dir" "$(basename "$(<"$work_dir/last_checkpoint")")"; }

# Runs a step once: its marker is written after it has succeeded.
step() {
  local marker=$work_dir/.$1.done title=$2
  shift 2
  if [[ -e $marker ]]; then
    say "$title: already done"
  else
    say "$title"
    "$@"
    touch "$marker"
  fi
}

train() {
  local resume=()
  [[ ! -e $work_dir/last_checkpoint ]] || resume=(--resume)
  "$python" tools/train.py "$config" --work-dir "$work_dir" "${resume[@]}"
}

evaluate() {
  "$python" tools/test.py "$config" "$(last_checkpoint)" --work-dir "$evaluation"
}

draw() {
  local images
  mapfile -t images < <(find "$data/val" -name '*.png' | sort)
  "$python" tools/image_demo.py "${images[@]:0:$num_pictures}" "$config" "$(last_checkpoint)" \
    --score-thr 0.5 --out-dir "$pictures"
}

mkdir -p "$work_dir"
say '[1/4] data: shapes on textured backgrounds'
"$python" tools/make_shapes_dataset.py --out "$data"
step train '[2/4] training, about 10 minutes on two free CPU cores' train
step evaluate '[3/4] evaluation on the val images' evaluate
step draw '[4/4] drawing predictions' draw

say "finished; to train again, remove $work_dir"
printf '    %-11s %s\n' \
  checkpoint "$(last_checkpoint)" \
  log "$(newest "$work_dir" -name '*.log' -not -path "$evaluation/*")" \
  metrics "$(newest "$evaluation" -name '*.json')" \
  pictures "$pictures/"
