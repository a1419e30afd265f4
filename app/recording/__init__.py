"""Recordings of the traffic: how long each request was and when it came, to be replayed by `relevo limit --trace`.

lines       one line of a recording, written and read
folder      the files: made, added to, listed, read, deleted (nothing of trio)
recording   the one that is being written: what it takes, and its bounds
recorder    writes while somebody wants it, bounded in time, requests and bytes; no request ever waits for it
"""
