"""``omniplane serve``: the command line of vLLM-Omni on Omniplane's services, for those who come from there.

Enters here: that command line's flags, what they mean for a deploy file, and which services one invocation starts and
keeps running. Must not: service code, which is started by command; the reading of deploy files, which is the control
plane's.
"""
