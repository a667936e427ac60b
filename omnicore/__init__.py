"""What every service shares: errors, configuration, logging, metrics, clock, back-off, gRPC plumbing, processes,
credentials.

Small by rule. No business logic, no knowledge of stages or replicas enters here, and nothing here imports a service.
"""
