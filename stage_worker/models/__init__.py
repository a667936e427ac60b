"""Model weights that come inside Python packages, made ready for an engine.

``catalog.resolve`` turns a model name of a deploy file into what the engine loads: names of the catalog become a
directory in the cache (converted at first use, once per machine), anything else is handed on as it is. Nothing here
imports torch, transformers or an engine, so that conversion is quick and runs wherever numpy does.
"""
