"""Stateless front: OpenAI HTTP and gRPC in, stage calls out.

Enters here: client protocols, routing, the flow of a request over the stage graph. Must not: etcd, engines, bulk
bytes between stages, deploy YAML. Everything here can be lost and restarted; truth comes from the control plane.
"""
