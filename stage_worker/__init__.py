"""Hosts one replica of one stage: engine, registrar, StageService, TransferService.

Enters here: engines and what feeds them. Must not: routing, etcd, YAML.
"""
