"""The page `/ops/limit`: an operator has the server look for its own limit, and sees it come.

wish      what is to be looked for, checked, and the words of `relevo limit` that it amounts to
search    one search as a value: what its process has told so far, and how it ended
child     the process that looks: started, read, and ended with the server
kept      earlier searches on disk (nothing of trio)
archive   the same without waiting for the disk
service   one search at a time, and only while nobody else is served
stream    the parts of the page that move, drawn once for all who look on
routes    page, JSON, stream, start, stop
"""
