"""Every annotated RPC over HTTP and JSON, and the OpenAPI document of the whole HTTP surface.

Here are: routes made of the protos' ``google.api.http`` annotations, requests read from paths, queries and bodies,
responses written as JSON, NDJSON or server-sent events, and the document that tells all that. Not here: what the RPCs
do (``gateway.grpc_api`` and the control plane), the OpenAI endpoints (``gateway.http``), and HTTP itself: handlers see
only an ``Exchange``.
"""
