#!/bin/sh
# Train an EAGLE-3 head with a vocabulary of 8,192 for the model of `make real-model`, within an hour of two idle cores.
# Interrupted, it goes on from there. Arguments: the folder of the interpreter, then any options of `outrider train-head`.
set -e
real=${OUTRIDER_REAL_MODEL:-${OUTRIDER_CACHE_DIR:-$HOME/.cache/outrider}/real-model}
bin=$1
shift
if [ ! -f "$real/corpus/prompts.jsonl" ]; then
    "$bin/python" -m models.recipe.prepare "$real/corpus" --tokenizer models/demo/target
    "$bin/python" -m models.recipe.prompts "$real/corpus"
fi
"$bin/outrider" train-head eagle3 --target "$real" --work "$real/training" --out "$real/eagle3" \
    --prompts "$real/corpus/prompts.jsonl" --held-apart tests/data/prompts.jsonl --draft-vocab 8192 \
    --num-prompts 1024 --max-tokens 128 --batch-size 4 --updates 500 "$@"
cd "$real/eagle3" && sha256sum config.json model.safetensors
