"""Routes every request over its pipeline's stage graph and speaks OpenAI HTTP and gRPC. Stateless.

Enters here: request flow, routing, client protocols. Must not: etcd, YAML, engines, connectors.
"""
