#!/usr/bin/env bash
# The gateway's RPCs with curl: one answer, a stream of lines, a stream of events, an error.
# Usage: rest.sh http://127.0.0.1:8000 MODEL
set -euo pipefail
server=${1:?usage: rest.sh http://HOST:PORT MODEL} model=${2:?usage: rest.sh http://HOST:PORT MODEL}
json='content-type: application/json'
request='{
  "model": "'"$model"'",
  "prompt": {"chat": {"messages": [{"role": "user", "parts": [{"text": "What is the capital of France?"}]}]}},
  "modalities": ["text"],
  "sampling": {"seed": "7"}
}'

echo "# unary"
curl -sS --fail-with-body "$server/api/v1/models"
echo
echo "# a line of JSON for every message"
curl -sS --fail-with-body --no-buffer "$server/api/v1/generate" -H "$json" -d "$request"
echo "# server-sent events"
curl -sS --fail-with-body --no-buffer "$server/api/v1/generate" -H "$json" -H 'accept: text/event-stream' -d "$request"
echo "# an error"
curl -sS "$server/api/v1/requests/no-such-request" -w '\n%{http_code}\n'
