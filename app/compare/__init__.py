"""`relevo compare`: the same requests under static, dynamic and continuous batching.

options     what was asked for, checked
load        the requests: lengths, and when they come
lengths     what the lengths alone allow, and how long a run should take
runs        one run of one policy, as a value
measure     runs on the engine, with the model's real work
rounds      runs of all policies in turn, as many as fit into the time
simulated   the same in virtual time, without a model
summary     from runs to figures
words       the figures on a terminal
page        the figures and the pictures as one HTML file
command     all of it in order
"""
