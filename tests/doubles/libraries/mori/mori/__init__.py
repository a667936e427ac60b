"""A double of amd-mori 1.2.4, which needs ROCm and RDMA devices: only ``mori.io``, and what tests set in ``switches``.

Names, enumerations and rules are those of the wheel's Python part, headers and bindings. Bytes really move: between
processes of one host, by process_vm_readv.
"""
