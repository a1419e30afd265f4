"""What outlives the process beside the keys: changes of the settings, events, and the history of the figures.

rows        what is kept of a second, and how seconds become longer spans
incidents   when something counts as an event (rules, no clock)
events      events, and the words of some
store       the SQLite file: schema, writing, reading
journal     the actor that writes, in batches, on a thread of its own; a bad disk never stops the server
recorder    looks at the engine once a second
series      what the page, its JSON and its CSV show of a span of time
"""
