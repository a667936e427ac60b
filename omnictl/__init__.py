"""The admin command line: talks to control planes and gateways as any client does.

Enters here: presentation and local launching. Must not: service code; it knows services by their protos and commands.
"""
