"""Running a cluster on this machine: processes, their order, their restarts, and what people see of it.

Enters here: child processes and the plan of who starts when. Must not: service code; services are started by command.
"""
