"""The OpenAI-compatible HTTP surface: JSON in, JSON and server-sent events out.

Enters here: HTTP, JSON shapes, encodings. Must not: routing, sessions, how a request runs.
"""
