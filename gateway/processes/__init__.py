"""Several gateway processes on one port: the one that starts and restarts them, and what they ask of each other.

Each process is a whole gateway, with its own sessions and watch. What a client asks for by id, and what tells about the
gateway as a whole, is answered by whichever process was reached, after it has asked the others.
"""
