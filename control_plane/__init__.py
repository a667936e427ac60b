"""Registration, liveness and pipelines over etcd. Stateless: all truth is in etcd, so any number of them may run.

Enters here: the etcd client, deploy-file reading, membership. Must not: anything that a single request touches.
"""
