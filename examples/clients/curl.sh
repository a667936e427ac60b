#!/usr/bin/env bash
# The same with curl. Usage: curl.sh http://127.0.0.1:8000 MODEL
set -euo pipefail
server=${1:?usage: curl.sh http://HOST:PORT MODEL} model=${2:?usage: curl.sh http://HOST:PORT MODEL}

curl -sS --fail-with-body "$server/v1/models"
echo
curl -sS --fail-with-body --no-buffer "$server/v1/chat/completions" -H 'content-type: application/json' -d '{
  "model": "'"$model"'",
  "messages": [{"role": "user", "content": "What is the capital of France?"}],
  "stream": true
}'
curl -sS --fail-with-body "$server/v1/audio/speech" -H 'content-type: application/json' -o speech.wav -d '{
  "model": "'"$model"'", "voice": "default", "input": "Hello from Omniplane.", "response_format": "wav"
}'
ls -l speech.wav
