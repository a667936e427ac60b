"""Child processes of a launcher: started, watched, restarted with back-off, stopped, and never outliving it.

Enters here: what every launcher needs, whatever it starts. Must not: which services there are and in which order they
start; that is the launcher's (``omnictl up``, ``omniplane serve``).
"""
