#!/usr/bin/env bash
# From a fresh machine to a trained model in one command: installs, prepares real text, trains a small GPT on two ranks
# through the deepspeed launcher, saves, resumes, evaluates, says what came out, and tries whether a wrong computation is
# noticed. A second call reuses what is there, but for the drill.
#
#   bash launch/quickstart.sh
#
# Needs Python 3.11 to 3.13 and pip. Works from any folder; after the first call no network is needed.
set -euo pipefail

case "${1:-}" in
    "") ;;
    -h | --help) sed -n '2,8p' "$0" | sed 's/^# \{0,1\}//'; exit 0 ;;
    *) echo "quickstart: unknown argument $1" >&2; exit 2 ;;
esac

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=launch/install.sh
source "$root/launch/install.sh"
cd "$root"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

config=configs/smoke.json
run_dir=runs/smoke

echo "== 1/5 text: the standard library of this Python, as tokens"
megasdc prepare-data --config "$config"

if megasdc summary "$run_dir" --require-finished >/dev/null 2>&1; then
    echo "== 2/5, 3/5 training: $run_dir holds a finished run; remove the folder to train again"
else
    echo "== 2/5 training on 2 ranks with ZeRO-1, first half; ends with a checkpoint"
    megasdc launch --num-ranks 2 --config "$config" --set megasdc.training.stop_step=200
    echo "== 3/5 training, second half, resumed from that checkpoint"
    megasdc launch --num-ranks 2 --config "$config" --set megasdc.checkpoint.resume=must
fi

echo "== 4/5 result"
megasdc summary "$run_dir"

echo "== 5/5 drill: the first 8 steps twice, once with a rank that computes something wrong in step 7"
megasdc drill --config "$config"
printf '\nFirst, in this shell and each new one\n  source %q\n' "$MEGASDC_VENV/bin/activate"
cat <<'EOF'

What to try next
  megasdc check-config configs/smoke.json --show       every setting with its value
  tensorboard --logdir runs                            after adding "tensorboard": {"enabled": true, "output_path": "runs"}
  docs/index.md                                        tutorials, guides, reference, results

Your own model
  megasdc init my.json                                 asks what it needs, and says the next three commands
EOF
