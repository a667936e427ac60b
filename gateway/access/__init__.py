"""Who may ask: API keys, roles, the audit log, and what browsers of other origins may do.

Adapters (HTTP, gRPC, REST) ask ``AccessControl`` who a caller is and whether it may do what it wants; how much it may
ask is ``gateway.admission``'s matter. Nothing here knows pipelines or replicas.
"""
