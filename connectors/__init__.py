"""The data plane: how bulk bytes get from one worker to another.

A connector publishes a ``Payload`` and returns a ``TransferHandle`` (a proto); a consumer that holds the handle reads
the payload through a connector of the same kind. Nothing here knows of requests, stages' order, gateways or etcd, and
nothing here imports a service.
"""
